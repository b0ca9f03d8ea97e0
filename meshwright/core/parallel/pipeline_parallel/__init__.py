"""Pipeline parallelism: stages of blocks, run by torch's schedules."""

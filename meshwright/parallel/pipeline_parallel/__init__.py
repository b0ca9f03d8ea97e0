"""Pipeline parallelism: stages of blocks on the schedules of torch.distributed.pipelining."""

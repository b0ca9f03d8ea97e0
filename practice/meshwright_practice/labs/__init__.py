"""Labs: exercises in which the user writes a part of distributed training, graded by what it does on local ranks."""

collect_ignore = ["trainer_ranks.py"]  # a script for ranks, which needs Accelerate

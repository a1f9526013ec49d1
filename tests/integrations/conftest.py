collect_ignore = ["hf_ranks.py"]  # a script for ranks, which needs Accelerate

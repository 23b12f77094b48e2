"""What stands behind the lessons: launching, reading and checking Qwen3 runs of torchtitan."""

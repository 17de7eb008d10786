"""MMLU, GPQA and other lm-eval tasks, run as lm-eval has them and kept item by item, without a word of a question."""

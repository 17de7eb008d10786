"""Fidelity harness for EXL3 quants: how far is a quant from its BF16 teacher?"""

__version__ = "0.1.0"

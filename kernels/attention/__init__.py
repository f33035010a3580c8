"""Attention over cached keys and values, rotary and ALiBi positions, and int8 keys and values.

Attention exists in torch (torch_), C (native_) and Triton (triton_). A new number format of keys
and values is one more beside int8_kv.py. No model family, session or cache is known here. Read
first: torch_attention.py.
"""

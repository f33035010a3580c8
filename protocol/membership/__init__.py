"""Private swarms: join codes, proofs of membership, and revocations.

Only secrets and signatures: nothing here opens a connection. Read first: join_code.py.
"""

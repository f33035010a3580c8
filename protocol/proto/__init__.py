"""The schema of control messages, and the code that protoc makes of it."""

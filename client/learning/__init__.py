"""Fine-tuning runs: texts from files, batches, the loop, checkpoints that a run goes on from."""

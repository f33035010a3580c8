"""Fine-tuning through a swarm: gradients through blocks that are on other machines."""

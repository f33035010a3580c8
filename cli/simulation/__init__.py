"""A swarm in simulated time: the real placement and routing decisions, machines made up."""

"""The list of what can be measured. Each name is also that of a module here, with a function
`measure`; they are imported only when chosen, because they load torch.
"""

PARTS = {
    "single": "One session: 2 peers, int8, 1 thread each",
    "sessions": "Many sessions at once, all clients in one process",
    "prompts": "Prompts",
    "newcomer": "First token while somebody else's long prompt is computed",
    "context": "Decoding behind a long text",
    "hop": "What a hop costs beside computing: tiny model, one peer",
    "memory": "Memory of a session, of all peers together",
    "flood": "A client beside another one that floods the peers",
    "finetune": "Gradients through frozen blocks, and steps beside a client that trains",
    "failover": "A lost peer",
    "start": "Starting",
    "accuracy": "int8 against fp32",
}
"""Titles by name, in the order in which they are measured."""

JOINED = "joined"
"""The part that a swarm elsewhere is measured by, instead of the others."""

TITLES = {**PARTS, JOINED: "A swarm that runs already, from here"}

"""Peers can read prompts if the weights are public: run `python examples/read_prompts.py`.

You will see what each of four peers makes of the hidden states of a prompt that it computes.
"""

from copy import deepcopy
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer, DynamicCache

from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm.loopback import LoopbackSwarm

MODEL = Path(__file__).resolve().parents[1] / "models" / "shoal-stories"


@torch.no_grad()
def read_tokens(weights: torch.nn.Module, hidden_TH: torch.Tensor) -> list[int]:
    """Return for each position the token that gives the nearest state behind those found so far."""
    vocabulary, cache, tokens = torch.arange(1536), DynamicCache(), list[int]()
    for hidden_H in hidden_TH:
        past = deepcopy(cache)
        past.batch_repeat_interleave(len(vocabulary))
        states_V1H = weights(vocabulary[:, None], None, None, past).last_hidden_state
        tokens.append(int((states_V1H[:, 0] - hidden_H).norm(dim=-1).argmin()))
        weights(torch.tensor([tokens[-1:]]), None, None, cache)  # adds to the cache
    return tokens


if __name__ == "__main__":
    tokenizer, weights = AutoTokenizer.from_pretrained(MODEL), AutoModel.from_pretrained(MODEL)
    prompt = tokenizer("My secret is 4711, says Edda Finn.", return_tensors="pt").input_ids
    layers, weights.norm = weights.layers, torch.nn.Identity()
    swarm = LoopbackSwarm(MODEL, [(0, 2), (2, 4), (4, 6), (6, 8)])
    with AutoDistributedModelForCausalLM.from_pretrained(MODEL, connect=swarm.connect) as model:
        for stop in (2, 4, 6, 8):
            hidden = model.transformer.h[:stop](model.get_input_embeddings()(prompt))
            weights.layers = layers[:stop]
            tokens = read_tokens(weights, hidden[0])
            num_right = sum(map(int.__eq__, tokens, prompt[0].tolist()))
            print(f"block {stop - 1}: {num_right} of {len(tokens)}: {tokenizer.decode(tokens)}")

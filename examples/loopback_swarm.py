"""A swarm in one process survives the loss of a peer: run `python examples/loopback_swarm.py`.

You will see the beginning of a story, a line that says which host was killed in mid-sentence,
the rest of the story, and that the words are those of an undisturbed run. No network is used.
"""

from pathlib import Path

from transformers import AutoTokenizer

from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm.loopback import LoopbackSwarm

MODEL = Path(__file__).resolve().parents[1] / "models" / "shoal-stories"


def main() -> None:
    """Tell a story, kill a peer half-way, and compare with the story told in one go."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompt = tokenizer("Once upon a time", return_tensors="pt").input_ids
    swarm = LoopbackSwarm(MODEL, spans=[(0, 4), (4, 8), (4, 8)])
    with AutoDistributedModelForCausalLM.from_pretrained(MODEL, connect=swarm.connect) as model:
        undisturbed = model.generate(prompt, max_new_tokens=48, do_sample=False)
        with model.inference_session(max_length=128) as session:
            begun = model.generate(prompt, max_new_tokens=20, do_sample=False)
            print(tokenizer.decode(begun[0], skip_special_tokens=True))

            host = swarm.find(session.hops[-1].peer.peer_id).host
            swarm.network.kill(host)
            ended = model.generate(max_new_tokens=28, do_sample=False)
            print(f"-- {host} was killed; {len(session.failovers)} hop was replaced --")
            print(tokenizer.decode(ended[0], skip_special_tokens=True))
        same = [*begun[0], *ended[0]] == [*undisturbed[0]]
        print("-- the same words as without --" if same else "-- OTHER words than without --")


if __name__ == "__main__":
    main()

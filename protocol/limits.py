"""Every bound on what a stranger may send, in one place.

Each is generous for honest use. They bound one message or record; what many strangers may hold at
one peer together is bounded where it is held, in `peer/streams/client_stream.py` and the KV cache.
"""

MAX_FRAME_BYTES = 16 * 2**20
"""One frame, header included. Longer prompts are cut into several steps by the client."""

MAX_SMALL_FRAME_BYTES = 16 * 2**10
"""A larger frame has to be admitted before it arrives, and has a deadline. Of a smaller one, all
streams that one peer serves hold 16 MiB."""

MAX_PIECE_BYTES = 256 * 2**10
"""The part of a larger frame that one message of the transport carries. Streams are many, and what
has arrived of a message is not counted; a connection carries about so much in each round trip."""

MIN_BYTES_PER_SECOND = 16 * 2**10
"""A connection that is slower than this while it carries a large frame counts as broken."""

MAX_CONTROL_BYTES = 64 * 2**10
"""The protobuf part of one frame."""

MAX_BATCH_ROWS = 256
"""Rows of one session: sequences times beams."""

MAX_STEP_TOKENS = 4096
"""Tokens per row of one step."""

MAX_PASS_TOKENS = 2**14
"""Rows times tokens of one pass: a client cuts a batch into microbatches."""

MAX_PASS_PROMPTS = 2**16
"""Deep prompts of one pass: blocks times rows times tokens."""

MAX_PASS_ADAPTERS = 2**16
"""Vectors that the gradients of the adapters of one pass fill."""

MAX_ADAPTER_BYTES = 2**26
"""The safetensors of one adapter, as far as it belongs to the blocks of one peer."""

MAX_ADAPTER_LEAVES = 1024
"""The blocks of one published adapter: so many leaves fit into the manifest in one frame."""

MAX_TRAINED_BYTES = 3 * MAX_ADAPTER_BYTES
"""The same with what an optimizer remembers of it, where a peer trains it."""

MAX_GRADIENT_PARTS = 2**12
"""Backward passes whose gradients a peer adds up for one update of an adapter that it trains."""

MAX_LEARNING_RATE = 100.0
"""Of an update, and the same for its decay: with more, adapters become infinite within a few."""

MAX_ADAPTER_CONFIG_BYTES = 2**14
"""Its `adapter_config.json`."""

MAX_RUN_MEMBERS = 256
"""Members of one training run, in all its stages."""

MAX_RUN_RECORD_BYTES = 2**20
"""The signed record of one run: enough for the shards of a large corpus."""

MAX_STAGES = 64
"""Stages of one training run."""

MAX_RESTARTS = 2**16
"""How often an update may be begun again."""

MAX_PARTS = 4096
"""Parts of one update. Sums of gradients keep twelve bits for them."""

MAX_UPDATES = 2**24
"""Updates of one training run."""

MAX_HELD_OUT_LOSS = 1e30
"""The largest held-out loss that members of a run tell, in nats per token."""

MAX_RUN_TENSOR_BYTES = 2**36
"""The largest that members of a run send each other in one answer, in pieces: what a stage has of
weights, sums or optimizer state."""

MAX_MEMBER_ID_CHARACTERS = 96
"""A peer id and a number: those of all members fit into one frame with the value of a decision."""

MAX_DECISION_VALUE_BYTES = 2**14
"""Of the value of one decision of a run: enough for digests and norms of 256 stages."""

MAX_DECISIONS = 2**32 - 1
"""The highest number of one: a run that takes one every second ends after 136 years."""

MAX_BALLOT_ATTEMPTS = 2**32 - 1
"""The same of ballots for one decision, of which each costs a round trip."""

MAX_SESSION_TOKENS = 2**20
"""Tokens per row of one session, whatever the model allows."""

MAX_HIDDEN_SIZE = 2**16
"""Width of a hidden state."""

MAX_BLOCKS = 4096
"""Blocks of one model."""

MAX_TEXT_CHARACTERS = 512
"""Any free text on the wire: error details, versions, names."""

MAX_SESSIONS_PER_STREAM = 16
"""Open sessions that one stream may hold."""

MAX_HOPS = 256
"""Hops of one route."""

MAX_ANNOUNCEMENT_BYTES = 2048
"""One signed announcement, as stored in the directory."""

MAX_ANNOUNCEMENT_TEXT_BYTES = 4096
"""The same as text, before it is packed."""

MAX_PEER_NAME_CHARACTERS = 32
"""What the owner of a peer calls it."""

MAX_ENDPOINTS = 8
"""Endpoints of one announcement."""

MAX_LOCAL_ENDPOINTS = 4
"""The same of those that only its own network can dial."""

MAX_ANNOUNCEMENTS_PER_MODEL = 10_000
"""Announcements that a reader looks at for one model."""

MAX_CLOCK_SKEW_SECONDS = 3.0
"""How far two clocks may differ; the DHT refuses to join beyond it."""

MAX_ANNOUNCEMENT_LIFETIME_SECONDS = 600.0
"""How far in the future an announcement may expire."""

"""One generation over a route of hops, and the failover when hops are lost. Not here: which peers
are the best (`routing/`), what a model does with hidden states, passes without a cache (`passes/`).

    inference_session    the face: synchronous, for one thread at a time
           │
        session          step, failover, fork, close      observed by: handoff, standby, a trace
     ┌─────┼────────┬───────────┐
  pipeline exchange push_plan  hops     pieces; a segment; who pushes to whom; find and open
     └─────┼────────┴───────────┘       (none of the four imports another)
    state, hop_link      facts, epoch, secrets, network; streams of one hop, its mailbox and log

Read first: session.py.
"""

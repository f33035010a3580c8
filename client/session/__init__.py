"""One generation over a route of hops, and the failover when hops are lost. Not here: which peers
are the best (`routing/`), what a model does with hidden states, passes without a cache (`passes/`).

    inference_session    the face: synchronous, for one thread at a time
           │
        session          step, failover, fork, close      beside it: replacements, standby
     ┌─────┼────────┬───────────┐
  pipeline │    push_plan     hops      pieces; who pushes to whom; find and open
     └─────┤        │           │
       exchange     │           │       a question to a segment, and its answer
           └────────┼───────────┘
    state, hop_link      facts, epoch, secrets, network; streams of one hop, its mailbox and log

Read first: session.py.
"""

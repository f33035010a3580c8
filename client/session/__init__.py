"""One generation over a route of hops, and the failover when hops are lost. Not here: which peers
are the best (`routing/`), what a model does with hidden states, passes without a cache (`passes/`).

    inference_session        the session without await, for one thread at a time
    session                  step, failover, fork, close
    replacements, standby    hot standbys, and hops that replace those of leaving peers
    pipeline                 the pieces of a step on their way
    push_plan, hops          which hop pushes to which; finding and opening hops
    exchange                 a question to a segment, and its answer
    hop_link, state          the streams, mailbox and log of one hop; what all parts share

Read first: session.py.
"""

"""How gRPC is set up at both ends: limits, keepalive, and what is switched off."""

from .pieces import MAX_MESSAGE_BYTES

MAX_STREAMS_PER_CONNECTION = 512
"""What one stranger may open; its further streams wait at its own end."""

MAX_STREAMS_PER_LISTENER = 2048
"""What all strangers together may open; further streams are turned down. Twice as many as a peer
serves by default: the others hear why it does not serve them."""

_WINDOW_BYTES = 64 * 2**10
"""What a client may send on a stream before anybody reads it. While a message is being read, gRPC
lets its rest come as well; that is all that a stranger's stream holds out of our sight."""

_COMMON_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Both ends notice a silent partner within 25 s, also while no stream is open.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
    # It would widen the window of every stream of a fast connection, without a bound.
    ("grpc.http2.bdp_probe", 0),
)
CHANNEL_OPTIONS = (
    *_COMMON_OPTIONS,
    # Channels to one address share their TCP connection otherwise, and bulk would delay tokens.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # A channel without a stream hangs up, and dials again for the next one.
    ("grpc.client_idle_timeout_ms", 60_000),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.enable_http_proxy", 0),
)

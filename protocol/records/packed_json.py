"""JSON of announcements, made small: thousands of them travel, and most of their bytes are names.

Raw DEFLATE (RFC 1951) with a preset dictionary of what all of them say.
"""

import zlib

from ..errors import RemoteProtocolError

# Whoever changes a byte of it changes the format: records of old and new peers are not the same
# then. What is frequent stands at the end, where references to it are short.
_DICTIONARY = (
    b'"state":"joining","state":"draining","state":"offline","weights":"bf16","weights":"nf4",'
    b'"weights":"fp32","compute_dtype":"bf16","compute_dtype":"fp16","adapters":["relays":[{"host":"'
    b'","port":31337,"peer_id":"12D3KooW"}],"parked_at":["192.168.10.127.0.0.1:'
    b'"kernels":"native int8 with avx512_vnni, torch attention, cuda triton"'
    b'{"peer_id":"12D3KooW","model_id":"","num_blocks":32,"span":{"start":0,"stop":16},'
    b'"state":"online","endpoints":[{"host":"1","port":4,"fingerprint":""}],"min_version":3,'
    b'"max_version":4,"weights":"int8","compute_dtype":"fp32","sequence":179,"issued_at":179,'
    b'"expires_at":179,"free_kv_tokens":1,"decode_steps_per_second":1,"prefill_tokens_per_second":1'
    b',"loaded_decode_steps_per_second":1,"queue_seconds":0.0,"rtts":[["12D3KooW",0.0],["12D3KooW"'
    b',0.0]],"coordinate":{"x":0.0,"y":-0.0,"z":0.0,"height":0.0,"error":0.1},"software":"shoal '
    b'0.1.0","kernels":"","relay_port":'
)
_RAW = -zlib.MAX_WBITS
_LEVEL = 9


def pack(text: bytes) -> bytes:
    """Return the text in fewer bytes.

    >>> text = b'{"peer_id":"12D3KooW","state":"online","weights":"int8"}'
    >>> len(pack(text)) < len(text) / 2
    True
    """
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW, zdict=_DICTIONARY)
    return packer.compress(text) + packer.flush()


def unpack(packed: bytes, max_bytes: int) -> bytes:
    """Return the text again; raises RemoteProtocolError for anything else, and for longer ones."""
    unpacker = zlib.decompressobj(_RAW, zdict=_DICTIONARY)
    try:
        text = unpacker.decompress(packed, max_bytes + 1)
    except zlib.error as error:
        raise RemoteProtocolError(f"the packed text is damaged: {error}") from error
    if len(text) > max_bytes or not unpacker.eof or unpacker.unused_data:
        raise RemoteProtocolError(f"the packed text is cut short, or longer than {max_bytes} bytes")
    return text

"""What a request may have to do with other engines, in the words of vLLM's tier of peers.

The keys in its `kv_transfer_params`, each named after the remote counterpart, and their fields:
what a router says and an engine reads. Only words; which of them go together is said where they
are read.
"""

DECODER, PREFILLER, SOURCE = "remote_decoder", "remote_prefiller", "remote_kv_source"
ROLES = (DECODER, PREFILLER, SOURCE)
ID, HOST, PORT = "kv_request_id", "remote_host", "remote_port"

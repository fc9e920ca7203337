"""What engines say to one another, and how chunks move between them. See docs/peers-protocol.md.

`messages`, `bounds`, `auth`, `agreement`, `session` and `directory` decide and never wait;
`control` carries messages over ZeroMQ, and `transports` move rows. The engine that wants a chunk
pulls it: nobody else ever writes into its memory. Loop only.
"""

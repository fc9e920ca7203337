"""`tiering proxy`: a small router before engines that give one another chunks.

Owns no cache: it sets the roles of requests, as the protocol of peers has them, and passes bytes
on. For trying, for tests, and as an example of what a router has to say; only the command uses it.
"""

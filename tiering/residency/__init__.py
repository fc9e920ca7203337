"""The core: who is where and what to do next. Sans-IO, one owner, no lock."""

"""The async shell: carries out the steps that the core asks for."""

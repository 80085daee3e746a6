"""Types, protocols, and the client and server halves of an algorithm. Imports torch and the standard library only."""

"""The families of the HTTP API, one module each; ``family`` is what they share."""

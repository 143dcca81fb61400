"""Keys, ciphers, and the form of an encrypted file. The only room that knows `cryptography`."""

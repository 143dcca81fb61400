"""Guards for changes of structure: show that a rebuilt tree does what the tree before did."""

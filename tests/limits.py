"""How long tests wait for other processes before a wait counts as a hang."""

# A fresh machine with two busy cores is several times slower than a developer's. The limit only
# ends tests that hang, so it is generous. pytest's own limit for one test is 300 s.
HANG_S = 200.0

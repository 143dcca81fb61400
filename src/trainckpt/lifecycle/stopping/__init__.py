"""How an attempt ends: who asks for it, what is saved within the deadline, and how it leaves."""

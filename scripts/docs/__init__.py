"""The documentation's generated part: what is made from the code, the cards and the measured results at build time.

`assemble.py` is the door; each further file makes one kind of page, as a dict from path to text that nothing but the
checkout decides.
"""

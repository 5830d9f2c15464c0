"""The process that hands out the turns on one device. Standard library only, so that it starts in no time.

Modules here import each other relatively and nothing else of the package: the arbiter runs from this directory, without
torch.
"""

"""The encoder of Ramesh et al. (2023), which looks at the past alone: families share it, and hand its weights on."""

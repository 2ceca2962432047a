"""The ops of a forward pass, over the page pool. `reference` is their definition."""

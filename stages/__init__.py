"""One module per DVC stage, and what the stages share: the model, the rollout engine, the trainer, objectives and rewards."""

"""Config -> LaunchPlan -> processes. Building a plan is pure, and nothing here imports torch."""

"""Config -> LaunchPlan -> processes. Building a plan is pure; the agent is the only module that imports torch."""

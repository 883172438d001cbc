"""The server."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from federated_digits import task
from torchpisa.federated.flower import FederatedStrategy, arrays

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and go on where a run that was interrupted has stopped."""
    config = context.run_config
    strategy = FederatedStrategy(
        task.algorithm(context),
        clients=int(config["clients"]),
        deadline=float(config["deadline"]),
        enough=int(config["enough"]) or None,
        staleness=int(config["staleness"]),
        poll=float(config["poll"]),
        seed=int(config["seed"]),
        checkpoint=str(config["checkpoint"]) or None,
    )
    strategy.start(
        grid, arrays(task.model()), num_rounds=int(config["rounds"]), evaluate_fn=task.evaluate
    )

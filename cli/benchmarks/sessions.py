"""Many sessions at once, against plain transformers with as many rows in one batch."""

from .clients import Clients, SwarmAddress, join_swarm
from .curve import CurvePoint, SessionsCurve
from .reference import CONTEXT_TOKENS
from .report import Findings
from .setting import Setting
from .timing import time_load

_BATCH_SIZES = (1, 16)
_MAX_TOKENS = 2000


def measure(setting: Setting) -> Findings:
    """Measure the reference, then every number of sessions."""
    swarm = setting.start_swarm(setting.model)
    setting.say("plain transformers")
    num_tokens = setting.effort.num_generated // 2
    reference = {
        num_rows: setting.reference.measure_generate(num_rows, num_tokens)
        for num_rows in _BATCH_SIZES
    }
    points = setting.run(_measure_points(setting, SwarmAddress.of(swarm, setting.model)))
    curve = SessionsCurve(tuple(points), reference)
    return Findings(curve.to_figures(), curve)


async def _measure_points(setting: Setting, address: SwarmAddress) -> list[CurvePoint]:
    async with join_swarm(address) as clients:
        await _measure_point(setting, clients, 2)  # warms up
        return [
            await _measure_point(setting, clients, num_sessions)
            for num_sessions in setting.effort.session_counts
        ]


async def _measure_point(setting: Setting, clients: Clients, num_sessions: int) -> CurvePoint:
    setting.say(f"{num_sessions} at once")
    model = setting.model
    sessions = [clients.open(_MAX_TOKENS) for _ in range(num_sessions)]
    for session in sessions:
        await session.step(model.make_hidden(CONTEXT_TOKENS), last_token_only=True)
    step_seconds, seconds = await time_load(sessions, model, setting.effort.load_seconds)
    clients.check_nothing_was_lost()
    await clients.close_sessions()
    return CurvePoint.of(num_sessions, step_seconds, seconds)

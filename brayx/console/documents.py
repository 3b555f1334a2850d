"""The bodies of the control API's requests and replies, as OpenAPI describes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_POINTS = 500
"""Maximum points of a curve; a longer one is thinned."""


class Document(BaseModel):
    """Base of all documents."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())


class Job(Document):
    """The job behind this console, and its health."""

    running: bool
    """False: the console shows a tracking store without a job."""
    mode: str = ""
    """``train`` or ``serve``."""
    project: str = ""
    trial: str = ""
    """The trial that is being trained."""
    num_steps: int | None = None
    """Env steps at which the training ends."""
    target_return: float | None = None
    """Return at which the training ends."""
    up_s: float = 0.0
    """Seconds since the job began."""
    waits_for: str = ""
    """The learner's state, in words."""
    doors: dict[str, str] = {}
    """URL of each door by its name."""
    sessions: int = 0
    """Number of running sessions."""
    numbers: dict[str, float] = {}
    """Newest value of each metric, as in the trial's ``numbers.json``."""
    refusals: dict[str, float] = {}
    """Number of refused requests by error code."""
    errors: list[str] = []
    """Losses, one line for each cause."""
    registered: dict[str, list[str]] = {}
    """Registered versions that new sessions use, by model component."""
    canaries: dict[str, Canary] = {}
    """Canaries by model component."""
    can_stop: bool = False
    """Whether the trial can be stopped from here."""
    tracking: str = ""
    """Tracking URI."""


class Canary(Document):
    """A model's canary."""

    name: str
    """Name of the registered model."""
    alias: str
    """Alias of the version that gets a share."""
    share: float
    """Share of the new sessions that use it, from 0 to 1."""


class Session(Document):
    """A running session."""

    session: str
    ticks: int
    idle_s: float
    """Seconds since its last request was answered."""
    followed: bool
    """Whether a viewer follows it."""
    player: str = ""
    """Its player in a league."""
    arms: list[str] = []
    """``MODEL/ALIAS/VERSION`` for each model that is served by an alias."""
    result: float | None = None
    """The newest return that its agents recorded."""


class Tick(Document):
    """One tick of a session, live or recorded."""

    number: int
    at_s: float
    """Live: Unix time of the reply. Recorded: seconds since the session's start."""
    seconds: float
    """How long the actor took; 0: not known."""
    event: str
    """``error: WHY``, ``fallback``, ``forwarded``, ``skipped N`` or ``resumed``; empty: nothing unusual happened."""
    input: Any
    """The game's body: JSON, or text."""
    output: Any
    """The reply."""
    arrays: dict[str, Any]
    """What the agents set on the state, by path."""
    action: Any = None
    probabilities: list[float] | None = None
    """Probabilities of the actions, if the tick has logits."""
    value: float | None = None
    policy_version: int | None = None
    image: str | None = None
    """An image among the arrays, as a PNG in a data URL."""


class Frame(Document):
    """A picture of a tick, drawn by the job's render."""

    number: int
    """The tick's number."""
    image: str | None
    """A PNG in a data URL; null: it could not be drawn."""
    failure: str = ""
    """Why it could not be drawn."""


class Ticks(Document):
    """The newest ticks of a followed session."""

    session: str
    ticks: list[Tick]
    after: int
    """Value of ``after`` for the next request."""
    end: str = ""
    """Why the session ended; empty: it runs."""
    result: float | None = None
    frame: Frame | None = None
    """The newest picture, which may be of an earlier tick; null: the job draws none, or has drawn none yet."""


class Version(Document):
    """A registered version of a model."""

    version: int
    aliases: list[str]
    step: int | None
    """Env steps of its checkpoint."""
    created_s: float
    trial: str
    """Id of the trial that it came from."""
    tags: dict[str, str]
    """Tags such as the return, the rating, results of serving, and the lineage."""


class Model(Document):
    """A registered model."""

    name: str
    aliases: dict[str, int]
    versions: list[Version]
    """The newest first."""
    before: int | None = None
    """Version of the previous champion, which a rollback restores; null: not known."""


class Move(Document):
    """The move of an alias from version ``before`` to ``version``."""

    name: str
    alias: str
    version: int
    before: int | None


class Trial(Document):
    """A trial of the tracking store."""

    run_id: str
    project: str
    name: str
    status: str
    """``running``, ``finished``, ``failed`` or ``interrupted``."""
    env_steps: float | None
    mean_return: float | None
    games: float | None
    """Number of games in the mean return."""
    champion: str
    is_child: bool
    can_stop: bool = False
    """Whether this console can stop it: the console's job trains it, and can be interrupted."""


class Curves(Document):
    """Curves of a trial."""

    run_id: str
    numbers: dict[str, float]
    """Newest value of every metric."""
    curves: dict[str, list[tuple[int, float]]]
    """``(step, value)`` by metric."""


class Standing(Document):
    """A member of a league."""

    member: str
    points: float
    low: float
    high: float
    """``low`` and ``high`` are the ends of the 95 % interval of the points."""
    elo: float
    games: int
    champion: bool
    env_steps: int | None


class Pairing(Document):
    """Results of two members, from the view of ``a``."""

    a: str
    b: str
    wins: int
    draws: int
    losses: int
    win_rate: float | None


class League(Document):
    """The newest league of the store."""

    project: str
    trial: str
    champion: str | None
    counters: dict[str, int]
    standings: list[Standing]
    payoff: list[Pairing]
    curves: dict[str, list[tuple[int, float]]]
    """``(env steps, points)`` of each player that learns."""


class Recording(Document):
    """A recorded session."""

    id: str
    session: str
    ticks: int
    began_s: float
    end: str
    result: float | None
    player: str
    why: str
    """Why it was recorded."""
    events: int
    lost: int
    """Number of ticks that could not be recorded."""
    frames: int
    """Number of ticks with a frame."""
    formats: list[str] = []
    """Formats in which it can be downloaded here."""


class Recordings(Document):
    """Recordings of the job's folder."""

    folder: str
    total: int
    """Number of all recordings."""
    selected: int
    """Number of recordings that match the requested session or game."""
    recordings: list[Recording]
    """The newest of the selected recordings, newest first."""
    unreadable: dict[str, str]
    """Files that cannot be read, with the reason."""


class RecordedTicks(Document):
    """Consecutive ticks of a recording."""

    recording: Recording
    start: Any
    """Body of the session's start: JSON, or else text."""
    start_reply: Any
    """Reply to it; null: an older recording, which lacks it."""
    first: int
    ticks: list[Tick]


class RecordedCurves(Document):
    """Curves over a recording's ticks, thinned."""

    ticks: list[int]
    curves: dict[str, list[float]]


class Comparison(Document):
    """A recorded session compared with a version of its model, or with two versions."""

    recording: str
    version: str
    """``models:/NAME/VERSION``."""
    reference: str
    """The version that it is compared with; empty: the recording."""
    done: bool
    """False: the numbers below are not known yet."""
    state: str
    """What the comparison is doing, in words."""
    progress: float
    """Share of the ticks compared so far."""
    ticks: int = 0
    """Number of compared ticks."""
    left_out: int = 0
    """Number of ticks that lack a needed array, such as failed ones."""
    first: int | None = None
    """Index in the recording of the first tick with another action; null: there is none."""
    agreement: float | None = None
    """Share of ticks with equal actions."""
    kl: float | None = None
    """Mean of KL(recorded || version) in nats; null: not known."""
    kl_max: float | None = None
    kl_exact: bool = True
    """False: it is estimated from the log-probabilities of the recorded actions."""
    value: float | None = None
    """Mean absolute difference of the values; null: not known."""
    curves: RecordedCurves | None = None
    """``KL`` and ``value difference`` by tick. In a long session, each point is the largest of a span of ticks."""


class Chosen(Document):
    """What a version would have done at a tick."""

    action: Any
    """Its most likely action."""
    probabilities: list[float] | None
    value: float | None


class ComparedTick(Document):
    """One compared tick."""

    number: int
    equal: bool
    """Whether the version's most likely action is the recorded one, or the reference's."""
    kl: float | None
    value: float | None
    """The version's value minus the recorded one, or the reference's."""
    chosen: dict[str, Chosen]
    """Keys ``version`` and, if there is one, ``reference``."""


class Cell(Document):
    """A cell of a board."""

    text: Annotated[str, Field(max_length=8)] = ""
    colour: Annotated[str, Field(pattern="^(#[0-9a-fA-F]{6})?$")] = ""
    """Colour of the text; empty: the page's."""
    label: Annotated[str, Field(max_length=80)] = ""
    """Description for screen readers."""


class BoardMove(Document):
    """A legal move."""

    move: Any
    """The value that the game gets: any JSON."""
    label: Annotated[str, Field(max_length=80)]
    at: tuple[int, int] | None = None
    """Row and column of the cell that is its button; null: its button is below the board."""


class Board(Document):
    """A game as a human sees it."""

    text: Annotated[str, Field(max_length=400)] = ""
    rows: Annotated[list[Annotated[list[Cell], Field(max_length=32)]], Field(max_length=32)]
    moves: Annotated[list[BoardMove], Field(max_length=1024)] = []
    """The human's legal moves; empty: the game has ended."""
    result: Literal["win", "draw", "loss"] | None = None
    """The human's result; null: the game goes on, or was given up."""


class Game(Document):
    """A game between a human and the job."""

    game: str
    board: Board
    opponent: dict[str, Any] | None
    """The job's choice, with keys such as ``player``, ``version`` and ``points``; null: it did not say."""
    over: bool


class Opponents(Document):
    """The opponents for a human."""

    why_not: str
    """Why nobody can play here; empty: a human can play."""
    think_s: float = 0.0
    """Time for a move, after which the game is lost with its session."""
    opponents: dict[str, dict[str, Any]] = {}
    """Requests for `NewGame`, by name. Besides these, the job may choose the opponent."""


class NewGame(Document):
    """Body of a new game."""

    opponent: dict[str, Any] | None = None
    """A request such as ``{"level": "easy"}`` or ``{"version": 3}``; null: the job chooses."""


class HumanMove(Document):
    """Body of a human's move."""

    move: Any


class Reference(Document):
    """Body of a promotion."""

    version: int
    alias: str = "champion"


class Share(Document):
    """Body of a change of a canary's share."""

    share: float


class Done(Document):
    """What a control call did, in words."""

    done: str


class Refusal(Document):
    """A typed error; see `brayx.errors`."""

    error: str
    """Its code."""
    message: str
    """What is wrong, and what was expected."""
    details: dict[str, Any]
    """Facts for programs."""

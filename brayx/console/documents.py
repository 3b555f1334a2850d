"""The documents of the control API, as OpenAPI describes them."""

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
    """Running sessions."""
    numbers: dict[str, float] = {}
    """Newest numbers by name, as in the trial's ``numbers.json``."""
    refusals: dict[str, float] = {}
    """Refused requests by the code of their error."""
    errors: list[str] = []
    """Losses, one line for each cause."""
    registered: dict[str, list[str]] = {}
    """Registered versions that new sessions get, by model component."""
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
    """Alias of the versions that get a share."""
    share: float
    """Share of the new sessions, from 0 to 1."""


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
    """Newest return that its agents recorded."""


class Tick(Document):
    """One tick of a session, live or recorded."""

    number: int
    at_s: float
    """Live: Unix time of the answer. Recorded: seconds since the session's start."""
    seconds: float
    """Time that the actor took; 0: not known."""
    event: str
    """``error``, ``fallback``, ``skipped N`` or ``resumed``; empty: nothing unusual."""
    input: Any
    """The game's body: JSON, or text."""
    output: Any
    """The reply."""
    arrays: dict[str, Any]
    """What the agents set, by path."""
    action: Any = None
    probabilities: list[float] | None = None
    """Of the actions, if the agents keep their logits."""
    value: float | None = None
    policy_version: int | None = None
    image: str | None = None
    """A frame among the arrays as a PNG in a data URL."""


class Frame(Document):
    """A picture of a tick, drawn by the job's render."""

    number: int
    """The tick's number."""
    image: str | None
    """A PNG in a data URL; null: it could not be drawn."""
    failure: str = ""
    """Why not."""


class Ticks(Document):
    """The newest ticks of a followed session."""

    session: str
    ticks: list[Tick]
    after: int
    """The next request's ``after``."""
    end: str = ""
    """Why the session ended; empty: it runs."""
    result: float | None = None
    frame: Frame | None = None
    """The newest picture, which may be of an earlier tick; null: the job draws none, or none yet."""


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
    """Its tags: return, rating, results of serving, lineage."""


class Model(Document):
    """A registered model."""

    name: str
    aliases: dict[str, int]
    versions: list[Version]
    """The newest first."""
    before: int | None = None
    """The champion that a rollback restores; null: not known."""


class Move(Document):
    """An alias that was moved."""

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
    """Games that the return is the mean of."""
    champion: str
    is_child: bool
    can_stop: bool = False
    """Whether this console can stop it: the job behind it trains it, and can be interrupted."""


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
    """Ends of the 95 % interval of the points."""
    elo: float
    games: int
    champion: bool
    env_steps: int | None


class Pairing(Document):
    """Results of two members, as the first sees them."""

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
    """``(env steps, points)`` by player that learns."""


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
    """Ticks that could not be recorded."""
    frames: int
    """Ticks with a frame."""


class Recordings(Document):
    """The newest recordings of the job's folder."""

    folder: str
    total: int
    """Number of all recordings."""
    recordings: list[Recording]
    """The newest first."""
    unreadable: dict[str, str]
    """Files that cannot be read, with the reason."""


class RecordedTicks(Document):
    """Consecutive ticks of a recording."""

    recording: Recording
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
    """What it does, in words."""
    progress: float
    """Share of the ticks that are compared."""
    ticks: int = 0
    """Ticks that were compared."""
    left_out: int = 0
    """Ticks without the arrays that are needed, such as one that failed."""
    first: int | None = None
    """Index, in the recording, of the first tick with another action; null: there is none."""
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
    """By tick ``KL`` and ``value difference``; of a long session the largest of each span of ticks."""


class Chosen(Document):
    """What a version would have done at a tick."""

    action: Any
    """The most likely one."""
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
    """By ``version`` and, if there is one, ``reference``."""


class Cell(Document):
    """A cell of a board."""

    text: Annotated[str, Field(max_length=8)] = ""
    colour: Annotated[str, Field(pattern="^(#[0-9a-fA-F]{6})?$")] = ""
    """Of the text; empty: the page's."""
    label: Annotated[str, Field(max_length=80)] = ""
    """What screen readers say of it."""


class BoardMove(Document):
    """A legal move."""

    move: Any
    """What the game gets; a JSON value."""
    label: Annotated[str, Field(max_length=80)]
    at: tuple[int, int] | None = None
    """Row and column of the cell that is its button; null: it has a button below the board."""


class Board(Document):
    """A game as a human sees it."""

    text: Annotated[str, Field(max_length=400)] = ""
    rows: Annotated[list[Annotated[list[Cell], Field(max_length=32)]], Field(max_length=32)]
    moves: Annotated[list[BoardMove], Field(max_length=1024)] = []
    """The human's legal moves; empty: the game has ended."""
    result: Literal["win", "draw", "loss"] | None = None
    """How it ended for the human; null: it goes on, or was given up."""


class Game(Document):
    """A game of a human."""

    game: str
    board: Board
    opponent: dict[str, Any] | None
    """Whom the job chose, such as ``player``, ``version`` and ``points``; null: it did not say."""
    over: bool


class Opponents(Document):
    """Whom a human can play with."""

    why_not: str
    """Why nobody can play here; empty: one can."""
    think_s: float = 0.0
    """Time for a move, after which the game is lost with its session."""
    opponents: dict[str, dict[str, Any]] = {}
    """Requests by name, for `NewGame`; the job's own choice is always possible, too."""


class NewGame(Document):
    """Body of a new game."""

    opponent: dict[str, Any] | None = None
    """Such as ``{"level": "easy"}``, ``{"version": 3}``; null: as the job serves."""


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

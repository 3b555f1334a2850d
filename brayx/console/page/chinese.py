"""The Chinese of the page's texts, by the English. Words in braces stand for values, which the page puts in.

Texts that the API gives, such as errors, stay English, except for the counts in its lines about losses.
"""
# ruff: noqa: RUF001  # Chinese punctuation

from __future__ import annotations

import re

from brayx.console import verdict

CHINESE: dict[str, str] = {
    # All pages
    "Overview": "概览",
    "Sessions": "会话",
    "Recordings": "录像",
    "Models": "模型",
    "League": "联赛",
    "Play": "对战",
    "Trials": "实验",
    "Help": "帮助",
    "Page not found": "找不到页面",
    "There is no such page": "没有这个页面",
    "The console has no page {path}.": "控制台没有页面 {path}。",
    "Go to the overview": "回到概览",
    "light or dark": "浅色或深色",
    "Loading …": "载入中 …",
    "Below is its last answer, of {time}.": "下面是它在 {time} 的最后一次回答。",
    "Cancel": "取消",
    "The job has ended, or its console cannot be reached. `brayx console` shows what it has saved.": (
        "任务已结束，或者无法连接它的控制台。`brayx console` 可以查看保存下来的内容。"
    ),
    "{n} d": "{n} 天",
    "{n} h": "{n} 小时",
    "{n} min": "{n} 分钟",
    "{n} s": "{n} 秒",
    "running": "运行中",
    "finished": "已完成",
    "failed": "失败",
    "interrupted": "已中断",
    # Charts of a trial
    "Return in evaluation": "评估中的回报",
    "Length of a game (last 100 games)": "一局的长度（最近 100 局）",
    "Entropy (high: it still tries out actions)": "熵（高：仍在尝试各种动作）",
    "Explained variance (1: it foresees the return)": "解释方差（1：完全预见回报）",
    "Loss": "损失函数",
    # Verdicts
    "Just started": "刚刚开始",
    "It is learning": "正在学习",
    "Too early to say": "下结论还太早",
    "No longer rising": "不再上升",
    "No progress": "没有进展",
    "Some games are failing": "有对局失败",
    "It is not working": "无法正常运行",
    "It has reached its target": "已达到目标",
    "It has finished": "训练已完成",
    "It has been interrupted": "训练已中断",
    "It has failed": "训练失败",
    "{leader} leads": "{leader} 领先",
    "No clear leader yet": "还没有明显的领先者",
    "Serving players": "正在为玩家服务",
    "Ready for players": "已就绪，等待玩家",
    "The canary is worse than the champion": "金丝雀比冠军差",
    verdict.LOST: "最近 {total} 局中有 {lost} 局失败。",
    verdict.UNHEARD: "学习器收不到环境步：{refused} 个请求被拒绝，多数的错误码是 {code}。",
    verdict.REFUSALS: "{refused} 个请求无法读取，只有 {games} 局结束。",
    verdict.NO_GAME: "没有游戏在运行，所以没有东西可学。",
    verdict.BEGINS: "正在进行最初的几局。",
    verdict.NO_CURVE: "已结束 {games} 局，最近 {window} 局的平均回报是 {value}；还没有曲线。",
    verdict.REACHED: "回报已达到目标。",
    verdict.AWAITS: "回报已达到目标；满 {wanted} 局后训练停止（现在 {games} 局）。",
    verdict.PLATEAU: "回报为 {value}，大致是目前的最高值，最近 {steps} 个环境步里没有再上升。",
    verdict.LEVEL: "最近 {steps} 个环境步里回报没有上升：在第 {peak} 步是 {high}，现在是 {value}。",
    verdict.ROSE: "最近 {steps} 个环境步里回报上升了 {rise}。",
    verdict.STAYED: "最近 {steps} 个环境步里回报几乎没有变化。",
    verdict.FELL: "最近 {steps} 个环境步里回报下降了 {fall}。",
    verdict.LEADS: "{leader} 有 {points} 分。",
    verdict.AHEAD: "{leader} 有 {points} 分（{low} 至 {high}），比 {second} 多 {lead} 分。",
    verdict.CLOSE: "{leader} 有 {points} 分（{low} 至 {high}），比 {second} 多 {lead} 分：差距可能只是偶然。",
    verdict.SERVES: "玩家：{sessions}。每秒回答 {ticks_per_s} 次，一半在 {p50} 毫秒内，99% 在 {p99} 毫秒内。",
    verdict.IDLE: "现在没有游戏在运行。",
    verdict.WAITS: "等待玩家操作的会话：{silent} 个。",
    verdict.FEW: "双方各结束 {games} 局后才能看出哪个更好。",
    verdict.BETTER: "版本 {canary} 比版本 {champion} 好：回报高 {difference}。",
    verdict.WORSE: "版本 {canary} 比版本 {champion} 差：回报低 {difference}。",
    verdict.UNMEASURED: "无法比较好坏：结果缺少标准误差。",
    verdict.SAME: "看不出差别：双方回报相同。",
    verdict.UNSHOWN: "看不出差别：相差 {difference}，双方各需约 {games} 局才能证明。",
    verdict.ENDS: "请在“模型”页结束金丝雀，之后的新会话都使用冠军。",
    verdict.SILENT: (
        "另有 {silent} 个会话 10 秒没有发送任何请求：游戏在每局结束时发送 stop 吗？docs/protocol.md 有说明。"
    ),
    verdict.NO_JOB: "这里没有运行任务。",
    verdict.CONTINUES: "请修改错误所指的代码，再运行同一条命令：训练会接着进行。",
    verdict.RESTARTS: "请修改错误所指的代码，然后重新启动服务。",
    verdict.PROCESS: "游戏进程不断退出：请手动运行它的命令，看看输出。",
    verdict.WATCH: "请在“录像”里看最近失败的一局，并查看游戏自己的日志。",
    verdict.CONNECT: "请启动一个游戏，连接到下面的某个入口。",
    verdict.REFUSED: "游戏发送的内容与任务的要求不符，请修改游戏。错误码的说明在 docs/protocol.md。",
    verdict.STALLED: "如果回报还能提高，请阅读 docs/zh/guide-not-learning.md；如果不能，就停止训练。",
    verdict.FINISHED: (
        "如果 {value} 已是这个游戏能得到的最高回报，训练就完成了，可以停止。"
        "如果不是，请阅读 docs/zh/guide-not-learning.md。"
    ),
    # Overview
    "training for {time}": "已训练 {time}",
    "started {time} ago": "{time} 前启动",
    "serving for {time}": "已服务 {time}",
    "{model} acts with {versions}": "{model} 使用 {versions}",
    "initial weights": "初始权重",
    "progress": "进度",
    "{share} done": "已完成 {share}",
    "{time} left": "还剩 {time}",
    "at most {time} left; it stops earlier at a return of {target} (now {value})": (
        "最多还剩 {time}；回报达到 {target} 时提前结束（现在 {value}）"
    ),
    "env steps": "环境步",
    "target": "目标",
    "return of the last 100 games": "最近 100 局的平均回报",
    "return of the newest games": "最新几局的回报",
    "of {games} games": "（{games} 局）",
    "of 1 game": "（1 局）",
    "in training, actions sampled": "训练时，动作按概率抽取",
    "as evaluated": "评估时",
    "as served": "服务时",
    "target {target}": "目标 {target}",
    "mean of the last {games} games": "最近 {games} 局的平均",
    "return {value}": "回报 {value}",
    "version {version}": "版本 {version}",
    "{difference} against the champion": "与冠军相差 {difference}",
    "{difference}, within chance": "{difference}，在偶然范围内",
    "The difference is within chance.": "差别在偶然范围内。",
    "Against the champion": "与冠军相比",
    "none yet": "还没有",
    "chosen when the training ends": "训练结束时选出",
    "level {name}": "难度 {name}",
    "{points} points ({low} to {high})": "{points} 分（{low} 至 {high}）",
    "{low} to {high}": "{low} 至 {high}",
    "Return": "回报",
    "Best return": "最佳回报",
    "Champion": "冠军",
    "Newest version": "最新版本",
    "Players now": "当前玩家",
    "Ticks/s": "每秒 tick 数",
    "Answer, p50": "回答时间 p50",
    "Answer, p99": "回答时间 p99",
    "Games": "局数",
    "Health": "运行状况",
    "Env steps": "环境步",
    "Age of the weights": "权重的滞后",
    "{count} versions": "{count} 个版本",
    "1 to 3 is normal": "1 到 3 属正常",
    "answers to games": "对游戏的回答",
    "{lost} of the last {total} failed": "最近 {total} 局中 {lost} 局失败",
    "Requests refused": "被拒绝的请求",
    "since the start": "自启动以来",
    "requests refused with {code}: {count}": "被拒绝的请求（{code}）：{count}",
    "Addresses for games (doors)": "供游戏连接的地址（入口）",
    "None.": "无。",
    "Open this guide": "打开这篇指南",
    "Versions in use": "在用的版本",
    "Version": "版本",
    "Ticks": "tick 数",
    "Errors": "错误",
    "Member": "成员",
    "Points": "分数",
    "95 % interval": "95% 区间",
    "Newest recording": "最新录像",
    "1 tick": "1 个 tick",
    "{ticks} ticks": "{ticks} 个 tick",
    "{ticks}, end: {end}": "{ticks}，结束：{end}",
    # Without a job
    "No job is running here": "这里没有运行任务",
    "No job is running here. In training: {trials}": "这里没有运行任务。正在训练：{trials}",
    "This console shows the tracking store {uri}": "这个控制台显示的是存储 {uri}",
    "Nothing is here yet. Start with `brayx new NAME`, then `brayx train NAME.yaml`.": (
        "这里还什么都没有。先运行 `brayx new NAME`，再运行 `brayx train NAME.yaml`。"
    ),
    "Projects": "项目",
    "Project": "项目",
    "Newest trial": "最新实验",
    "Newest trials": "最新实验",
    "Newest recordings": "最新录像",
    "Status": "状态",
    # Models
    "No model is registered yet: a training registers its best checkpoint when it ends.": (
        "还没有注册模型：训练结束时会注册它最好的检查点。"
    ),
    "Result": "成绩",
    "Registered": "注册时间",
    "Return in service": "线上回报",
    "{points} points": "{points} 分",
    "Roll back to {version}": "回退到 {version}",
    "Roll back": "回退",
    "{count} older versions are not shown.": "另有 {count} 个较旧的版本没有显示。",
    "Promote": "设为冠军",
    "Make candidate": "设为候选",
    "Compare": "比较",
    "Make version {version} the {alias} of {name}?": "把版本 {version} 设为 {name} 的 {alias}？",
    "Version {version}: {result}.": "版本 {version}：{result}。",
    "Now it is version {version}: {result}.": "现在是版本 {version}：{result}。",
    "It is worse than the version that it replaces.": "它比被替换的版本差。",
    "It has no result yet.": "它还没有成绩。",
    "In the league, version {version} scored {share} in {games} games against version {other}.": (
        "在联赛中，版本 {version} 对版本 {other} 的 {games} 局得分率为 {share}。"
    ),
    "It passes its league's gate: {reason}.": "它通过了联赛的关卡：{reason}。",
    "It fails its league's gate: {reason}.": "它没有通过联赛的关卡：{reason}。",
    "Its league's gate cannot be checked: {why}": "无法检查联赛的关卡：{why}",
    "The running job has no `canary`, so no session gets the candidate.": (
        "正在运行的任务没有设置 `canary`，所以没有会话会用到候选版本。"
    ),
    "Canary of {component}": "{component} 的金丝雀",
    "{name} (before)": "{name}（之前）",
    "Version {version} of {name} is {alias} and champion, so all new sessions get it.": (
        "{name} 的版本 {version} 既是 {alias} 也是冠军，所有新会话都使用它。"
    ),
    "share of the canary": "金丝雀的比例",
    "Set": "设置",
    "Promote the canary": "把金丝雀设为冠军",
    "End the canary": "结束金丝雀",
    "Stop giving new sessions to the canary?": "不再把新会话分给金丝雀？",
    "{share} of new sessions get the {alias} of {name}, the others its champion.": (
        "{share} 的新会话使用 {name} 的 {alias}，其余使用冠军。"
    ),
    "{share} of new sessions of {name} get the canary.": "{name} 的新会话有 {share} 使用金丝雀。",
    "{name} version {version} is {alias} now.": "{name} 的 {alias} 现在是版本 {version}。",
    "{name} version {version} is {alias} now; before it was version {before}.": (
        "{name} 的 {alias} 现在是版本 {version}，之前是版本 {before}。"
    ),
    # Recordings
    "Session": "会话",
    "Began": "开始",
    "End": "结束",
    "Events": "事件",
    "Played by": "由谁操作",
    "weights {number}": "权重 {number}",
    "stopped by the game": "游戏结束了会话",
    "error": "出错",
    "no more requests": "没有后续请求",
    "connection lost": "连接断开",
    "refused, so the game left": "请求被拒绝，游戏离开了",
    "ended by hand": "手动结束",
    "the job ended": "任务已结束",
    "moved to another process": "移到另一个进程",
    "taken over by another process": "由另一个进程接管",
    "a regular sample": "定期抽取",
    "it failed": "出错了",
    "the game asked for it": "游戏要求录制",
    "Recorded because": "录制原因",
    "Session or game": "会话或对局",
    "Lowest return": "回报下限",
    "Highest return": "回报上限",
    "only with errors": "只看有错误的",
    "Nothing is recorded yet. A component `kind: recording` in the job records its sessions.": (
        "还没有录像。在任务里加一个 `kind: recording` 的组件，就会录下会话。"
    ),
    "None of the newest recorded sessions has ended yet.": "最近录制的会话都还没有结束。",
    "No recording matches. An id may contain *: 4f1c* finds those that begin with 4f1c.": (
        "没有这样的录像。会话名可以带 *：4f1c* 会找到以它开头的会话。"
    ),
    "{count} in {folder}": "{folder} 中共 {count} 个",
    "{selected} of {all}": "选中 {selected} 个；{all}",
    "{count} files cannot be read: {why}": "{count} 个文件无法读取：{why}",
    "Tick": "第几个 tick",
    "Action": "动作",
    "Value": "价值",
    "Weights": "权重",
    "Time": "用时",
    "Input": "输入",
    "Reply": "回答",
    "nothing": "无",
    "Action probabilities": "动作概率",
    "Values set by the agents": "智能体设置的值",
    "How the game ended": "游戏如何结束",
    "terminated": "终止",
    "truncated": "截断",
    "Not known: neither the model's outputs nor the agents' values have `logits`.": (
        "未知：模型的输出和智能体的值里都没有 `logits`。"
    ),
    "The first {shown} of {count} actions.": "{count} 个动作中的前 {shown} 个。",
    "Download:": "下载：",
    "play": "播放",
    "← → move by a tick, with Shift by ten, Page keys by a hundred; Home, End; space plays.": (
        "← → 移动一个 tick，加 Shift 移动十个；Page 键移动一百个；Home、End 到两端；空格播放。"
    ),
    "Curves": "曲线",
    "Compare with another version": "与另一个版本比较",
    "Start and its reply": "开始与回答",
    "No board: the game sent none.": "没有棋盘：游戏没有发送。",
    "No pictures: set `frames` in the job's recording, or add a `kind: render` or `kind: board`.": (
        "没有画面：请在任务的录像里设置 `frames`，或加一个 `kind: render` 或 `kind: board`。"
    ),
    "{count} ticks lost": "丢失 {count} 个 tick",
    "played by {player}": "玩家：{player}",
    # Sessions
    "untrained model": "未训练的模型",
    "Running sessions": "正在运行的会话",
    "No session is running. One begins when a game connects to a door of the job.": (
        "没有正在运行的会话。游戏连接到任务的入口时，会话就开始。"
    ),
    "Idle": "空闲",
    "Player or version": "玩家或版本",
    "Waiting for its next tick …": "等待它的下一个 tick …",
    "Pause": "暂停",
    "Live": "实时",
    "End session": "结束会话",
    "End session {session}? Its game gets an error.": "结束会话 {session}？它的游戏会收到错误。",
    "End it": "结束",
    "Watch its recording": "看它的录像",
    "Below is its last answer.": "下面是它的最后一次回答。",
    "The session has ended: {end}.": "会话已结束：{end}。",
    "The frame cannot be drawn: {why}": "画面无法绘制：{why}",
    # League
    "There is no league in this store. `brayx new NAME --template league` makes a job with one.": (
        "这个存储里没有联赛。`brayx new NAME --template league` 可以建立一个。"
    ),
    "Standings": "排名",
    "Who beats whom": "谁胜谁",
    "{name} learns to beat the whole league.": "{name} 学习战胜整个联赛。",
    "{name} learns to beat {of}, and so finds its weaknesses.": "{name} 学习战胜 {of}，从而找出它的弱点。",
    "{name} learns to beat all earlier versions.": "{name} 学习战胜所有较早的版本。",
    "{name} is a version of an earlier training; it does not learn.": "{name} 是以前训练得到的版本，不再学习。",
    "{name} (script)": "{name}（脚本）",
    "{name} is a program; it does not learn.": "{name} 是一个程序，不会学习。",
    "A name with a number is a registered version: the player as it was then. ★ marks the league's champion.": (
        "带数字的名字是注册的版本，即该玩家当时的样子。★ 表示联赛的冠军。"
    ),
    "400 points more win ten games of eleven. Elo is a simpler rating, for comparison.": (
        "高 400 分，十一局中约胜十局。Elo 是一种较简单的评分，供比较。"
    ),
    "Ratings": "分数变化",
    "The payoff: share of games that the row won against the column; a draw is half a win.": (
        "胜负表：行对列的胜率；平局算半胜。"
    ),
    "A player that learns counts with all its games, also its first ones.": (
        "正在学习的玩家按全部对局计算，包括最早的。"
    ),
    "No player's rating has changed yet.": "还没有玩家的分数变化。",
    "champion: {champion}; games: {games}": "冠军：{champion}；局数：{games}",
    "in service: {served}; champion of the league: {champion}; games: {games}": (
        "服务中：{served}；联赛冠军：{champion}；局数：{games}"
    ),
    "counted": "有效",
    "broken off": "中断",
    "contradictory": "结果矛盾",
    "refused": "被拒绝",
    "wins": "胜",
    "loses": "负",
    "win rate": "胜率",
    # Play
    "Play against a version": "与一个版本对战",
    "the job decides": "由任务决定",
    "opponent": "对手",
    "New game": "新的一局",
    "Give up": "认输",
    "Play again": "再来一局",
    "You have {time} for a move; after that the game is lost.": "每步有 {time}，超时就输。",
    "Starting the game …": "正在开始 …",
    "You play {move} …": "你走 {move} …",
    "Given up.": "已认输。",
    "The game cannot go on.": "对局无法继续。",
    "Your opponent: {opponent}.": "你的对手：{opponent}。",
    "Your move.": "轮到你了。",
    "What the agent is thinking": "智能体的想法",
    "Keys 1 to {keys} play the first {keys} moves; Tab and Enter any.": (
        "数字键 1 到 {keys} 走前 {keys} 种走法；Tab 和 Enter 可走任意一种。"
    ),
    "The agent wins.": "智能体赢了。",
    "The agent loses.": "智能体输了。",
    "You win.": "你赢了。",
    "You lose.": "你输了。",
    "A draw.": "平局。",
    "The game has ended.": "对局已结束。",
    "There is no job behind this console.": "这个控制台后面没有任务。",
    "This page cannot draw the game: its job has no `kind: board`. Play in the game itself, through a door:": (
        "页面无法显示这个游戏：任务没有 `kind: board` 组件。请在游戏里对战，它连接到某个入口："
    ),
    "A training plays its own games. A served job plays with humans: `brayx serve`.": (
        "训练只进行自己的对局。与人对战请用 `brayx serve`。"
    ),
    # Comparisons
    "There is no registered version to compare with yet.": "还没有可以比较的注册版本。",
    "model": "模型",
    "version": "版本",
    "against": "对照",
    "the recording": "录像",
    "Starting …": "正在启动 …",
    "Stop": "停止",
    "First other action": "第一个不同的动作",
    "Equal actions": "相同的动作",
    "Mean difference (KL)": "平均差异（KL）",
    "Largest difference (KL)": "最大差异（KL）",
    "difference (KL) {value}": "差异（KL）{value}",
    "Value, difference": "价值差",
    "Difference of the probabilities (KL, 0: the same)": "概率的差异（KL，0 表示相同）",
    "Difference of the values": "价值之差",
    "tick": "tick 序号",
    "none": "没有",
    "tick {number}": "tick {number} 处",
    "starting": "正在启动",
    "loading the versions": "正在载入版本",
    "comparing": "正在比较",
    "done": "已完成",
    "This tick was left out of the comparison.": "这个 tick 没有参与比较。",
    "It has no `logits`, or too many to keep them for every tick.": "它没有 `logits`，或者数量太多。",
    "the same action": "动作相同",
    "another action": "动作不同",
    "{version}: action {action}": "{version}：动作 {action}",
    "value {value}": "价值 {value}",
    "{version} against {other}, {ticks} ticks": "{version} 对照 {other}，{ticks} 个 tick",
    "{count} without their observation or action are left out": "有 {count} 个缺少观测或动作，没有参与比较",
    "the difference of the probabilities is estimated from those of the recorded actions": (
        "概率的差异由录下的动作的概率估计"
    ),
    "It would have chosen differently in {share} of the ticks.": "它会在 {share} 的 tick 里作出不同的选择。",
    "The recorded actions were sampled; the version's are its most likely ones. Some differ by chance.": (
        "录像里的动作是抽样得到的，而版本取最可能的动作：有些不同只是偶然。"
    ),
    # Trials
    "Duration": "时长",
    "Search": "搜索",
    "Choose two to six trials to compare them.": "选择两到六个实验进行比较。",
    "There are no trials yet: `brayx train` starts one.": "还没有实验：`brayx train` 会开始一个。",
    "Only the newest {count} are listed.": "只列出最新的 {count} 个。",
    "No metrics yet.": "还没有指标。",
    "Return by player": "各玩家的回报",
    "MLflow (`mlflow ui` must run)": "MLflow（需要先运行 `mlflow ui`）",
    "MLflow's table of the project": "MLflow 里这个项目的表格",
    "Settings": "设置",
    "Without a group": "未分组",
    "Return of the last 100 games": "最近 100 局的平均回报",
    "Settings that differ": "不同的设置",
    "Their settings are the same.": "它们的设置相同。",
    "Setting": "设置项",
    "Learner": "学习器",
    "Replay": "回放",
    "Games and sessions": "对局与会话",
    "Rollouts": "环境执行",
    "Evaluation": "评估",
    "The game's own": "游戏自己的指标",
    "Stop training": "停止训练",
    "Stop this training? It saves a last checkpoint, and the same command resumes it.": (
        "停止训练？它会保存最后的检查点，再运行同一条命令即可继续。"
    ),
    "Stop it": "停止",
    "Finish: register last snapshots": "完成训练：注册最后的快照",
    "Finishing registers a last snapshot of each player and completes the training. No champion is made.": (
        "完成训练会为每个玩家注册最后一个快照，并结束训练，不产生新冠军。"
    ),
    "Finish: register the best version": "完成训练：注册最好的版本",
    "No checkpoint has a return of enough games yet: only the last one can be registered.": (
        "还没有检查点的回报来自足够多的对局：只有最后一个可能被注册。"
    ),
    "The best version is that after {steps} env steps, with a {result}, unless the last one is better.": (
        "最好的版本是第 {steps} 个环境步之后的，{result}，除非最后一个更好。"
    ),
    "It is stopping …": "正在停止 …",
    "Stopped.": "已停止。",
    "The job has ended": "任务已结束",
    "Below are its last numbers.": "下面是它最后的数字。",
    "`brayx console` shows it": "用 `brayx console` 查看",
    "ended": "已结束",
    "Resume with: {command}": "继续训练：{command}",
    "Trial": "实验",
}

_COUNTS = tuple(
    (re.compile(english), chinese)
    for english, chinese in (
        (r"^([\d,]+) errors? in (\w+)$", r"\2 中有 \1 个错误"),
        (r"^([\d,]+) fragments? dropped \((.*)\)$", r"丢弃 \1 个片段（\2）"),
        (r"^([\d,]+) games? failed \((.*)\)$", r"\1 局失败（\2）"),
        (r"^([\d,]+) gamecores? failed$", r"\1 个游戏进程出错退出"),
        (r"^([\d,]+) ranks? of the learner failed, and all start again$", r"学习器的 \1 个进程失败，全部重新启动"),
        (r"^([\d,]+) (?:frames?|ticks?) not recorded \((.*)\)$", r"\1 个画面或 tick 没有录下（\2）"),
        (r"^([\d,]+) requests? refused \((.*)\)$", r"拒绝了 \1 个请求（\2）"),
        (r"^self-play has no results$", "自我对弈没有结果"),
        (r"^([\d,]+) sessions? ended without a stop, after a silence$", r"\1 个会话长时间没有请求，没有 stop 就结束了"),
        (r"^lost: ", "损失："),
        (r"([\d,]+) of the last ([\d,]+) games \((\d+%)\)", r"最近 \2 局中的 \1 局（\3）"),
        (r"([\d,]+) of the last ([\d,]+) fragments \((\d+%)\)", r"最近 \2 个片段中的 \1 个（\3）"),
        (r"^transitions dropped before the learner took them: ", "学习器取用之前丢弃的转移："),
    )
)
"""Chinese of the counts in the API's lines about losses, by their English."""


def chinese_line(line: str) -> str:
    """A line about losses (`brayx.jobs.progress.error_lines`) in Chinese; the error in it stays as it is."""
    count, newest, error = line.partition("; the newest: ")
    for english, chinese in _COUNTS:
        count = english.sub(chinese, count)
    return count + (f"；最近一次：{error}" if newest else "")

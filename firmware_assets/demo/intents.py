"""The command classes: single-turn intents, their paraphrases and their answers in two languages.

A template is text with ``{slot}`` fields and ``[a|b|]`` alternatives. Every intent keeps two lists
a language: templates for training, and held-out ones that training never renders.
"""

from __future__ import annotations

from dataclasses import dataclass

CLASSES = ("navigation", "climate", "media", "diagnosis")

# slot -> canonical value -> (English surfaces, Chinese surfaces); the first surface is the display
ENUMS: dict[str, dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "zone": {
        "driver": (("driver side", "driver's side"), ("主驾", "驾驶位")),
        "passenger": (("passenger side", "passenger's side"), ("副驾", "副驾驶位")),
        "rear": (("rear", "back row"), ("后排", "后座")),
        "all": (("whole cabin", "cabin"), ("全车", "车内")),
    },
    "seat": {
        "driver": (("driver seat", "driver's seat"), ("主驾座椅", "驾驶座椅")),
        "passenger": (("passenger seat", "front passenger seat"), ("副驾座椅", "副驾驶座椅")),
        "rear": (("rear seats", "back seats"), ("后排座椅", "后座座椅")),
    },
    "window": {
        "front": (("windshield", "front window"), ("前挡风玻璃", "前窗")),
        "rear": (("rear window", "back window"), ("后挡风玻璃", "后窗")),
    },
    "category": {
        "charging_station": (("charging station", "charger"), ("充电站", "充电桩")),
        "parking": (("car park", "parking garage"), ("停车场", "停车位")),
        "restaurant": (("restaurant", "place to eat"), ("餐厅", "饭店")),
        "gas_station": (("gas station", "petrol station"), ("加油站", "加油的地方")),
        "pharmacy": (("pharmacy", "drugstore"), ("药店", "药房")),
    },
    "avoid": {
        "tolls": (("tolls", "toll roads"), ("收费站", "收费路段")),
        "highways": (("highways", "motorways"), ("高速", "高速公路")),
        "ferries": (("ferries", "ferry crossings"), ("轮渡", "渡轮")),
    },
    "sensor": {
        "temperature": (("temperature", "motor temperature"), ("温度", "电机温度")),
        "vibration": (("vibration", "vibration level"), ("振动", "振动值")),
        "pressure": (("pressure", "hydraulic pressure"), ("压力", "液压压力")),
        "current": (("current", "motor current"), ("电流", "电机电流")),
        "speed": (("speed", "spindle speed"), ("转速", "主轴转速")),
    },
    "symptom": {
        "overheating": (("overheating", "too hot"), ("过热", "太烫")),
        "noise": (("making a strange noise", "very loud"), ("有异响", "声音很大")),
        "leak": (("leaking oil", "leaking"), ("漏油", "在漏")),
        "jam": (("jammed", "stuck"), ("卡住了", "卡料了")),
        "vibration": (("vibrating badly", "shaking"), ("振动很大", "一直在抖")),
    },
}

# JSON field of a slot, where it is not the slot's own name
FIELDS = {"fan_level": "level", "seat_level": "level"}


@dataclass(frozen=True)
class Phrases:
    """Paraphrases of one request in one language."""

    train: tuple[str, ...]
    heldout: tuple[str, ...]


@dataclass(frozen=True)
class Intent:
    """A request that stands alone: its action and the slots that its templates must fill."""

    action: str
    slots: tuple[str, ...]
    en: Phrases
    zh: Phrases
    defaults: tuple[tuple[str, str], ...] = ()

    @property
    def command_class(self) -> str:
        return self.action.split(".")[0]


EN = "[please |can you |could you |i want you to ||||]"
ENP = "[, please| please||||]"
ZH = "[请|麻烦|帮我|请帮我||||]"

INTENTS: tuple[Intent, ...] = (
    Intent(
        "navigation.start",
        ("destination",),
        Phrases(
            (
                EN + "[navigate|drive|take me|guide me|bring me] to {destination}" + ENP,
                EN + "[start|set] [navigation|the route|a route] to {destination}" + ENP,
                "[i want|i need|we want|we need|i would like] to [go|drive|get] to {destination}",
                "[let's|let us] [go|drive|head] to {destination}" + ENP,
                "[how do i|how do we|how can i] get to {destination}?",
                "{destination}, [take me there|let's go|start the route]" + ENP,
            ),
            (
                "[please |]show me the way to {destination}",
                "we need a route to {destination} now",
                "{destination} please, start navigation",
            ),
        ),
        Phrases(
            (
                ZH + "[导航|开车|带我|带路][去|到]{destination}",
                ZH + "[开始|规划]去{destination}的[导航|路线]",
                "[我想|我要|我们要|我们想][去|到]{destination}",
                "[怎么|如何][去|到]{destination}[？|]",
                "[出发|走吧][，|]去{destination}",
                "{destination}[，|][带我去|导航过去|怎么走]",
            ),
            ("去{destination}的路怎么走", "我们出发去{destination}吧", "导航，目的地{destination}"),
        ),
    ),
    Intent(
        "navigation.find",
        ("category",),
        Phrases(
            (
                EN + "[find|look for|search for] [a|the nearest|the next] {category}" + ENP,
                "[where is|is there] [a|the nearest|the next] {category}[ near here| nearby|]?",
                "[i need|we need|i want] [a|the nearest|the next] {category}[ near here| nearby|]",
            ),
            (
                "any {category} near here?",
                "[show me|look up] the nearest {category}",
            ),
        ),
        Phrases(
            (
                ZH + "[找|搜索|查找][一个|最近的|附近的|下一个]{category}",
                "[附近|前面|这里][有|有没有|哪里有]{category}[吗|]",
                "[我想|我要|我需要]找[最近的|附近的|一个]{category}",
            ),
            ("最近的{category}在哪里", "搜一下附近的{category}"),
        ),
    ),
    Intent(
        "climate.set",
        ("zone", "temperature"),
        Phrases(
            (
                EN
                + "[set|turn|put|change] the {zone} [temperature |]to {temperature}[ degrees|]"
                + ENP,
                EN + "[make|keep] the {zone} {temperature} degrees" + ENP,
                "[i want|i would like|we want] {temperature} degrees [on|in|for] the {zone}",
                "{temperature} degrees [on|in|for] the {zone}" + ENP,
                "the {zone} should be [at |]{temperature}[ degrees|]",
                "{zone} temperature {temperature}[ degrees|]" + ENP,
            ),
            (
                "[please |]bring the {zone} to {temperature} degrees",
                "{zone}, {temperature} degrees please",
                "temperature {temperature} for the {zone}",
            ),
        ),
        Phrases(
            (
                ZH + "把{zone}[温度|空调][调到|设为|设成|调成]{temperature}度",
                ZH + "[调|设置]{zone}[温度|空调][到|为]{temperature}度",
                "{zone}[温度|空调|][调到|要|设为]{temperature}度",
                "[我想|我要]{zone}{temperature}度",
                "{temperature}度[，|]{zone}",
            ),
            ("{zone}的温度请设成{temperature}度", "空调{zone}开到{temperature}度", "让{zone}保持{temperature}度"),
        ),
    ),
    Intent(
        "climate.set",
        ("temperature",),
        Phrases(
            (
                EN + "[set|turn|put|change] the [temperature|heating|climate] to {temperature}" + ENP,
                EN + "[make|keep] it {temperature} degrees[ in here|]" + ENP,
                "[i want|i would like|we want] {temperature} degrees[ in here|]",
                "temperature {temperature}[ degrees|]" + ENP,
            ),
            ("the temperature should be {temperature}", "{temperature} degrees please"),
        ),
        Phrases(
            (
                ZH + "把[温度|空调][调到|设为|设成|调成]{temperature}度",
                "[温度|空调][调到|要|设为]{temperature}度",
                "[我想|我要]{temperature}度",
            ),
            ("温度请设成{temperature}度", "空调开到{temperature}度"),
        ),
        defaults=(("zone", "all"),),
    ),
    Intent(
        "climate.fan",
        ("fan_level",),
        Phrases(
            (
                EN + "[set|turn|put|change] the fan to [level |speed |]{fan_level}" + ENP,
                "fan [level|speed] {fan_level}" + ENP,
                "[i want|i would like] the fan [at|on] [level |]{fan_level}",
            ),
            ("the fan should be at level {fan_level}", "[please |]make the fan speed {fan_level}"),
        ),
        Phrases(
            (
                ZH + "把[风量|风速|风扇][调到|设为|设成|调成]{fan_level}[档|级]",
                "[风量|风速|风扇][调到|要|开]{fan_level}[档|级]",
            ),
            ("风速请设成{fan_level}档", "风扇开到{fan_level}级"),
        ),
    ),
    Intent(
        "climate.seat",
        ("seat", "seat_level"),
        Phrases(
            (
                EN + "[set|turn|put|change] the {seat} [heating|heater] to [level |]{seat_level}" + ENP,
                EN + "[warm|heat] the {seat} [at|on|to] level {seat_level}" + ENP,
                "{seat} [heating|heater] [level |]{seat_level}" + ENP,
            ),
            ("[please |]put the heating of the {seat} on {seat_level}", "level {seat_level} for the {seat} heating"),
        ),
        Phrases(
            (
                ZH + "把{seat}加热[调到|设为|设成|调成]{seat_level}[档|级]",
                "{seat}加热[调到|要|开|]{seat_level}[档|级]",
            ),
            ("{seat}的加热请设成{seat_level}档", "加热{seat}到{seat_level}级"),
        ),
    ),
    Intent(
        "climate.defrost",
        ("window",),
        Phrases(
            (
                EN + "[defrost|defog|clear] the {window}" + ENP,
                EN + "turn on the {window} [defroster|heating]" + ENP,
                "the {window} is [foggy|frozen|icy]",
            ),
            ("[please |]start the defroster of the {window}", "there is [fog|ice] on the {window}, clear it"),
        ),
        Phrases(
            (
                ZH + "[给|打开]{window}[除霜|除雾]",
                "{window}[起雾了|结冰了|有霜]",
            ),
            ("{window}需要除雾", "开始给{window}除霜"),
        ),
    ),
    Intent(
        "media.play",
        ("title",),
        Phrases(
            (
                EN + "[play|put on|start] [the song |the track ||]{title}" + ENP,
                "[i want|i would like|we want] to [hear|listen to] [the song |]{title}",
                "[let's|let us] [hear|listen to] {title}" + ENP,
            ),
            ("[please |]play me the track {title}", "the song {title}, please"),
        ),
        Phrases(
            (
                ZH + "[播放|放|来一首|放一首][歌曲|]{title}",
                "[我想|我要|我们想]听[歌曲|]{title}",
                "[来|放]一首{title}",
            ),
            ("歌曲{title}，放一下", "请给我播放{title}"),
        ),
    ),
    Intent(
        "media.play",
        ("title", "artist"),
        Phrases(
            (
                EN + "[play|put on|start] [the song |the track ||]{title} [by|from] {artist}" + ENP,
                "[i want|i would like|we want] to [hear|listen to] {title} [by|from] {artist}",
                EN + "[play|put on|start] {artist} with {title}" + ENP,
            ),
            ("[please |]play me {title}, the one by {artist}", "the song {title} from {artist}, please"),
        ),
        Phrases(
            (
                ZH + "[播放|放|来一首|放一首]{artist}的{title}",
                "[我想|我要|我们想]听{artist}的{title}",
                "[来|放]一首{artist}唱的{title}",
            ),
            ("{artist}的歌曲{title}，放一下", "请给我播放{artist}唱的{title}"),
        ),
    ),
    Intent(
        "media.radio",
        ("frequency",),
        Phrases(
            (
                EN + "[tune|switch|turn] [the radio |]to {frequency}[ FM| MHz|]" + ENP,
                EN + "[play|put on|start] [the radio |FM |]{frequency}" + ENP,
                "radio {frequency}[ FM|]" + ENP,
            ),
            ("[please |]set the radio to {frequency} FM", "i want to hear the radio on {frequency}"),
        ),
        Phrases(
            (
                ZH + "[把|]收音机[调到|切换到]{frequency}[兆赫|]",
                ZH + "[播放|收听|听]FM{frequency}",
                "[广播|电台]{frequency}",
            ),
            ("我想听收音机FM{frequency}", "电台请调到{frequency}兆赫"),
        ),
    ),
    Intent(
        "media.volume",
        ("volume",),
        Phrases(
            (
                EN + "[set|turn|put|change] the [volume|sound|music] to {volume}[ percent|%|]" + ENP,
                "[volume|sound] [at |to |]{volume}[ percent|%|]" + ENP,
                "[i want|i would like] the [volume|sound] at {volume}[ percent|]",
            ),
            ("the volume should be {volume} percent", "[please |]make the volume {volume}"),
        ),
        Phrases(
            (
                ZH + "把[音量|声音][调到|设为|设成|调成]{volume}",
                "[音量|声音][调到|要|设为|]{volume}",
            ),
            ("音量请设成{volume}", "声音开到{volume}"),
        ),
    ),
    Intent(
        "media.next",
        (),
        Phrases(
            (EN + "[skip|next] [this song|this track|song|track]" + ENP, "[play|go to] the next [song|track]" + ENP),
            ("[please |]skip to the next song",),
        ),
        Phrases((ZH + "[播放|放|切到|换]下一首[歌|]", "[下一首|切歌|换一首]"), ("跳到下一首歌",)),
    ),
    Intent(
        "media.pause",
        (),
        Phrases(
            (EN + "pause[ the music| the song| it|]" + ENP, EN + "[stop|hold] the [music|song]" + ENP),
            ("music, pause please",),
        ),
        Phrases((ZH + "[暂停|停止][播放|音乐|]", "[音乐|歌][停一下|暂停]"), ("把音乐暂停一下",)),
    ),
    Intent(
        "diagnosis.lookup",
        ("machine", "code"),
        Phrases(
            (
                EN + "[explain|look up|check] [fault|error|code|fault code|error code] {code} [on|of|from] {machine}" + ENP,
                "what does [fault|error|code|fault code|error code] {code} mean [on|for] {machine}?",
                "{machine} [shows|reports|has|displays] [fault |error |code |]{code}[, what is it?| again|]",
                "[there is|we have] [fault|error|code] {code} [on|at] {machine}",
            ),
            (
                "what is error {code} on {machine}?",
                "{code} on {machine}, please explain the fault",
                "{machine} stopped with fault {code}",
            ),
        ),
        Phrases(
            (
                ZH + "[解释|查询|查一下]{machine}的[故障|报警|故障码|错误码]{code}",
                "{machine}[报|显示|出现|又报]{code}[故障|错误|报警|][，怎么回事|是什么意思|]",
                "{machine}的[故障码|错误码]{code}[是什么意思|怎么回事]",
            ),
            ("故障码{code}，设备{machine}，解释一下", "{machine}停机了，显示错误{code}"),
        ),
    ),
    Intent(
        "diagnosis.status",
        ("machine",),
        Phrases(
            (
                "[what is|show me] the [status|state|condition] of [machine |]{machine}[?|]",
                "[how is|is] [machine |]{machine} [doing|running|okay]?",
                EN + "[check|show] [the status of |the state of |]{machine}" + ENP,
            ),
            ("machine {machine}, what is the state?", "[please |]show the condition of {machine}"),
        ),
        Phrases(
            (
                ZH + "[查看|检查|显示]{machine}的[状态|情况|运行状态]",
                "{machine}[状态|情况|运行][怎么样|正常吗|如何]",
                "[设备|机器]{machine}[怎么样|正常吗]",
            ),
            ("设备{machine}的运行情况如何", "看一下{machine}的状态"),
        ),
    ),
    Intent(
        "diagnosis.read",
        ("machine", "sensor"),
        Phrases(
            (
                EN + "[read|show|check|give me] the {sensor} [of|on|at] {machine}" + ENP,
                "what is the {sensor} [of|on|at] {machine}[ now| right now|]?",
                "{machine} {sensor}" + ENP,
                "how [high|much] is the {sensor} [of|on|at] {machine}?",
            ),
            ("{machine}, what is the {sensor}?", "[please |]read me the {machine} {sensor}"),
        ),
        Phrases(
            (
                ZH + "[读取|查看|显示|检查]{machine}的{sensor}",
                "{machine}[的|][当前|现在的|]{sensor}[是多少|多少|怎么样]",
                "{machine}{sensor}",
            ),
            ("{sensor}是多少，设备{machine}", "看一下{machine}现在的{sensor}"),
        ),
    ),
    Intent(
        "diagnosis.inspect",
        ("machine", "symptom"),
        Phrases(
            (
                "[machine |]{machine} is {symptom}[, what should i do?| again| now|]",
                "[why is|i think] {machine} [is |]{symptom}[?|]",
                "[help|problem], {machine} is {symptom}",
            ),
            ("there is a problem, machine {machine} is {symptom}", "{machine} is {symptom}, please check"),
        ),
        Phrases(
            (
                "[设备|机器|]{machine}{symptom}[，怎么办|，请检查|]",
                "[为什么|怎么回事，]{machine}{symptom}",
                "{machine}[现在|又]{symptom}",
            ),
            ("机器{machine}有问题，{symptom}", "{machine}{symptom}，检查一下"),
        ),
    ),
    Intent(
        "diagnosis.history",
        ("machine", "hours"),
        Phrases(
            (
                EN + "show [me |]the [alarms|faults|history] of {machine} [for|from] the last {hours} hours" + ENP,
                "[what happened on|which alarms had] {machine} in the last {hours} hours?",
                "{machine} [alarms|faults|history], last {hours} hours" + ENP,
            ),
            ("the last {hours} hours of {machine}, show the alarms", "which faults had {machine} in the last {hours} hours?"),
        ),
        Phrases(
            (
                ZH + "[显示|查看|查询]{machine}[最近|过去]{hours}小时的[报警|故障|记录]",
                "{machine}[最近|过去]{hours}小时[有什么报警|有哪些故障|的记录]",
            ),
            ("最近{hours}小时{machine}有哪些报警", "看一下{machine}过去{hours}小时的故障"),
        ),
    ),
)

# action -> (English, Chinese) sentence; optional slots are handled by the suffixes below
REPLIES: dict[str, tuple[str, str]] = {
    "navigation.start": ("Starting the route to {destination}.", "正在导航去{destination}。"),
    "navigation.find": ("Looking for the nearest {category}.", "正在查找最近的{category}。"),
    "navigation.stop": ("Adding a stop at {stop} on the way to {destination}.", "去{destination}途中经过{stop}。"),
    "navigation.eta": ("Checking the arrival time at {destination}.", "正在查询到达{destination}的时间。"),
    "navigation.go": ("Driving to the nearest {category}.", "正在前往最近的{category}。"),
    "navigation.cancel": ("Navigation cancelled.", "导航已取消。"),
    "climate.set": ("Setting the {zone} to {temperature} degrees.", "{zone}温度设为{temperature}度。"),
    "climate.fan": ("Setting the fan to level {fan_level}.", "风量设为{fan_level}档。"),
    "climate.seat": ("Heating the {seat} at level {seat_level}.", "{seat}加热设为{seat_level}档。"),
    "climate.defrost": ("Defrosting the {window}.", "正在给{window}除霜。"),
    "climate.cancel": ("Climate setting cancelled.", "空调设置已取消。"),
    "media.play": ("Playing {title}.", "正在播放{title}。"),
    "media.radio": ("Tuning the radio to {frequency}.", "收音机调到{frequency}。"),
    "media.volume": ("Setting the volume to {volume}.", "音量设为{volume}。"),
    "media.next": ("Skipping to the next track.", "播放下一首。"),
    "media.pause": ("Music paused.", "音乐已暂停。"),
    "media.repeat": ("Playing {title} again.", "再放一遍{title}。"),
    "media.artist": ("Playing more by {artist}.", "播放更多{artist}的歌。"),
    "media.cancel": ("Media request cancelled.", "播放已取消。"),
    "diagnosis.lookup": ("Looking up fault {code} of {machine}.", "正在查询{machine}的故障{code}。"),
    "diagnosis.status": ("Checking the status of {machine}.", "正在检查{machine}的状态。"),
    "diagnosis.read": ("Reading the {sensor} of {machine}.", "正在读取{machine}的{sensor}。"),
    "diagnosis.inspect": ("{machine} needs an inspection.", "{machine}需要检查。"),
    "diagnosis.history": ("Showing the last {hours} hours of {machine}.", "显示{machine}最近{hours}小时的记录。"),
    "diagnosis.reset": ("Resetting fault {code} of {machine}.", "正在复位{machine}的故障{code}。"),
    "diagnosis.stop": ("Stopping {machine} safely.", "正在安全停止{machine}。"),
    "diagnosis.cancel": ("Diagnosis cancelled.", "诊断已取消。"),
}

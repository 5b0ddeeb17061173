"""Slot values of the command grammar and their split into training and held-out values.

A value belongs to the held-out split when the hash of its kind and text falls into one of six
buckets, so the two splits are disjoint by construction, whatever the seed of the generator.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Literal

Split = Literal["train", "heldout"]
Language = Literal["en", "zh"]
Value = str | int | float

PLACE_WORDS = """Harbour Station Airport Castle Market Garden River Bridge North South Temple Museum
Stadium Library Central Victoria Windmill Orchard Lakeside Cathedral Marina Summit Valley Meadow
Foundry Granite Juniper Willow Maple Cedar Falcon Heron Liberty Union Kings Queens Abbey Chapel
Berlin Hamburg Oslo Turin Lyon Kyoto Boston Denver Austin Dublin Zurich Vienna Prague Lisbon
Geneva Munich Porto Seville Cardiff Leeds Bergen Malmo Ghent Utrecht Krakow Riga Tallinn""".split()
PLACE_ENDINGS = """Street Road Avenue Square Hotel Hospital Park Mall Plaza Airport Station School
Tower Museum Beach Depot Warehouse""".split()
SONG_WORDS = """Silver Morning Golden Rain Midnight Train Blue River Summer Night Dancing Shadow Fire
Heart Echo Winter Light Broken Mirror Paper Moon Electric Dream Ocean Wild Horses Velvet Sky Lonely
Road Crystal Thunder Honey Ghost Neon Garden Scarlet Letter Falling Stars Empty Room Burning Bridge
Whisper Diamond Rebel Hurricane Marble Candle Sunset Gravity Satellite Carousel Lantern""".split()
SONG_GLUE = ("of the", "in the", "and", "for", "without", "on")
ARTIST_WORDS = """Wolves Pilots Sisters Kings Foxes Harbour Marlow Stone Rivers Vega Nova Lake Delgado
Moreau Lindqvist Okafor Tanaka Bennett Carver Holloway Petrov Ines Clara Otis Miles Freya Hugo Nina
Arlo Stella Ivan Ruby Felix Astrid Dario Mira""".split()
SYLLABLES = """ba be bi bo bra da del dor el en fa fen ga gar glen ha har hol in ka kel ko la lan len
lo lor ma mar mel mi mon na nor o or pa pel ra ren ri ros sa sel sha sol ta tan ter ti tor u va ven
vi vor wal wen wick xa yar zan zel""".split()
HANZI = """中山东西南北大小新古金银长安平和文明光华春秋夏冬天地江河湖海云雨风雪星月日红绿青白黑
花草树林松竹梅兰龙凤虎马鱼鸟石玉水火土木桥门城村镇园庭院楼阁台高远福寿康宁乐永兴隆昌盛丰泰
建设人民解放胜利友谊世纪科技工业学府朝阳滨港湾岛岸峰岭谷溪泉清静美丽家乡爱情梦想时间回忆故事
夜晚晨曦雾霞飞翔舞歌声琴弦心灵少年孩子老街旧路灯塔船帆王李张刘陈杨赵黄周吴徐孙胡朱郭何罗宋梁
伟芳娜敏静强磊军洋勇艳杰涛超秀英明霞波辉刚健丹萍鹏飞雷鸣晓""".replace("\n", "")
PLACE_SUFFIXES_ZH = ("路", "街", "大道", "机场", "公园", "医院", "酒店", "广场", "大厦", "火车站", "学校", "仓库")
RARE_HANZI = (0x4E00, 0x9FA5)  # first and last code point of the characters used as rare ones


def is_heldout(kind: str, value: Value) -> bool:
    """Whether ``value`` of slot ``kind`` belongs to the held-out split."""
    digest = hashlib.blake2s(f"{kind}:{value}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % 6 == 0


def _in_split(
    kind: str, split: Split, rng: random.Random, draw: Callable[[random.Random], Value]
) -> Value:
    """Draw until the value belongs to ``split``."""
    while True:
        value = draw(rng)
        if is_heldout(kind, value) == (split == "heldout"):
            return value


def _synthetic_word(rng: random.Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 2, 3)))).capitalize()


def _word(rng: random.Random, listed: list[str], split: Split) -> str:
    """A listed or a synthetic word of ``split``: words, not only names, are held out."""
    made = rng.random() < 0.5
    draw = _synthetic_word if made else lambda r: r.choice(listed)
    return str(_in_split("word", split, rng, draw))


def _hanzi(rng: random.Random, count: int, split: Split) -> str:
    """``count`` characters; the whole string, and any rare character in it, are of ``split``."""

    def draw(r: random.Random) -> str:
        text = "".join(r.choice(HANZI) for _ in range(count))
        if r.random() < 0.12:
            rare = str(_in_split("word", split, r, lambda s: chr(s.randint(*RARE_HANZI))))
            at = r.randrange(count)
            text = text[:at] + rare + text[at + 1 :]
        return text

    return str(_in_split("word", split, rng, draw))


def _cased(rng: random.Random, name: str) -> str:
    return name.lower() if rng.random() < 0.15 else name


def destination(rng: random.Random, split: Split, language: Language) -> str:
    """A place: a street with or without a house number, a building, a town."""
    if language == "zh":
        name = _hanzi(rng, rng.choice((1, 2, 2, 2, 3)), split) + rng.choice(PLACE_SUFFIXES_ZH)
        return f"{name}{rng.randint(1, 399)}号" if rng.random() < 0.2 else name
    name = _word(rng, PLACE_WORDS, split)
    if rng.random() < 0.3:
        name = f"{name} {_word(rng, PLACE_WORDS, split)}"
    if rng.random() < 0.75:
        name = f"{name} {rng.choice(PLACE_ENDINGS)}"
        if rng.random() < 0.25:
            name = f"{rng.randint(1, 399)} {name}"
    return _cased(rng, name)


def title(rng: random.Random, split: Split, language: Language) -> str:
    """A song title."""
    if language == "zh" and rng.random() < 0.85:
        return _hanzi(rng, rng.randint(2, 5), split)
    words = [_word(rng, SONG_WORDS, split) for _ in range(rng.choice((1, 2, 2, 3)))]
    if len(words) > 1 and rng.random() < 0.3:
        words.insert(1, rng.choice(SONG_GLUE))
    return _cased(rng, " ".join(words))


def artist(rng: random.Random, split: Split, language: Language) -> str:
    """A singer or a band."""
    if language == "zh" and rng.random() < 0.85:
        return _hanzi(rng, rng.randint(2, 3), split)
    name = " ".join(_word(rng, ARTIST_WORDS, split) for _ in range(rng.choice((1, 2, 2))))
    return _cased(rng, f"The {name}" if rng.random() < 0.2 else name)


def machine(rng: random.Random, split: Split, language: Language) -> str:
    """A machine id such as ``PX-204`` or ``R7-12``."""
    del language

    def draw(r: random.Random) -> str:
        letters = "".join(r.choice("ABCDEFGHKLMNPRSTVWX") for _ in range(r.choice((1, 2, 2, 3))))
        digits = "".join(r.choice("0123456789") for _ in range(r.choice((1, 2, 2, 3, 4))))
        return f"{letters}-{digits}"

    return str(_in_split("machine", split, rng, draw))


def code(rng: random.Random, split: Split, language: Language) -> str:
    """A fault code such as ``E1042``."""
    del language

    def draw(r: random.Random) -> str:
        digits = "".join(r.choice("0123456789") for _ in range(r.choice((2, 3, 3, 4))))
        return f"{r.choice('EFAWPU')}{digits}"

    return str(_in_split("code", split, rng, draw))


def temperature(rng: random.Random, split: Split, language: Language) -> Value:
    """A cabin temperature in degrees Celsius, whole or half."""
    del language

    def draw(r: random.Random) -> Value:
        return r.randint(16, 30) + (0.5 if r.random() < 0.2 else 0)

    return _in_split("temperature", split, rng, draw)


def volume(rng: random.Random, split: Split, language: Language) -> Value:
    """A loudness in percent."""
    del language
    return _in_split("volume", split, rng, lambda r: r.randint(1, 99))


def hours(rng: random.Random, split: Split, language: Language) -> Value:
    """A span of a history in hours."""
    del language
    return _in_split("hours", split, rng, lambda r: r.randint(2, 72))


def frequency(rng: random.Random, split: Split, language: Language) -> Value:
    """A radio frequency in MHz."""
    del language
    return _in_split("frequency", split, rng, lambda r: r.randint(875, 1080) / 10)


def fan_level(rng: random.Random, split: Split, language: Language) -> Value:
    """A fan level; too few values to hold any out."""
    del split, language
    return rng.randint(1, 7)


def seat_level(rng: random.Random, split: Split, language: Language) -> Value:
    """A seat heating level; too few values to hold any out."""
    del split, language
    return rng.randint(1, 3)


OPEN_SLOTS: dict[str, Callable[[random.Random, Split, Language], Value]] = {
    "destination": destination,
    "stop": destination,
    "title": title,
    "artist": artist,
    "machine": machine,
    "code": code,
    "temperature": temperature,
    "volume": volume,
    "hours": hours,
    "frequency": frequency,
    "fan_level": fan_level,
    "seat_level": seat_level,
}

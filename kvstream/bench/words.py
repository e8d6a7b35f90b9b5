"""The words that prompts are made of: 512 short English ones, each of them one token for most tokenizers.

Whether they are for the tokenizer at hand is found out before a run (``prompts``); those that are not are left out.
"""

from __future__ import annotations

_TEXT = (
    "able about above across action after again against age agree air all almost alone along already also always "
    "among amount animal answer any apple area arm around art ask away baby back bad bag ball bank base basic bath "
    "beach bear beat beauty because become bed before began begin behind believe below best better between big bird "
    "bit black blood blue board boat body bone book born both bottom box boy branch bread break bright bring broad "
    "brother brought brown build building burn business busy but buy call came camp can capital captain car card care "
    "carry case cat catch cause cell center certain chair chance change chart check chief child children choose "
    "church circle city class clean clear climb clock close clothes cloud coast coat cold collect college color come "
    "common company complete control cook cool copper copy corn corner cost cotton could count country course court "
    "cover cow cross crowd cry current cut dance dark data daughter day dead deal dear death decide deep degree "
    "describe desert design develop did different dinner direct distance divide doctor dog dollar door double down "
    "draw dream dress drink drive drop dry during each early ear earth east easy eat edge effect egg eight either "
    "electric else end enemy energy engine enough enter equal even evening event ever every exact example except "
    "exercise expect experience explain express eye face fact fair fall family famous far farm fast father fear feel "
    "feet fell few field fight figure fill final find fine finger finish fire first fish fit five flat floor flow "
    "flower fly follow food foot force foreign forest form forward found four free fresh friend from front fruit full "
    "game garden gas gave general get girl give glad glass go gold gone good got govern grand grass gray great green "
    "grew ground group grow guess guide gun hair half hand happen happy hard has hat have head hear heard heart heat "
    "heavy held help her here high hill him his history hit hold hole home hope horse hot hour house how huge human "
    "hundred hunt hurry ice idea image inch include indeed industry insect inside interest into iron island job join "
    "joy judge jump just keep key kill kind king kitchen knew know lady lake land language large last late laugh law "
    "lay lead learn least leave left leg length less letter level lie life lift light like line list listen little "
    "live local log long look lost lot loud love low machine made mail main major make man many map mark market mass "
    "master match material matter may mean measure meat meet member memory men message metal method middle might mile "
    "milk million mind mine minute miss model modern moment money month moon more morning most mother mountain mouth "
    "move movement much music must name nation natural nature near need never new next night nine noise north nose "
    "note nothing notice noun ocean offer office often old open order other outside over own page paint paper part "
    "pass path pay people perhaps period person picture piece place plain plan plane plant play point "
)
WORDS: tuple[str, ...] = tuple(_TEXT.split())

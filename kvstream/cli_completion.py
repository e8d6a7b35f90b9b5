"""``kvstream completion``: a script that completes commands and options in the user's shell.

The scripts are ours and not click's, because click's call the program by the name that it had when they were printed,
and zsh's gives up where that name is not on the PATH. A file that was downloaded is called `./kvstream-linux-x86_64` or
whatever its owner likes. So what is called is the word on the command line, and the variable that asks for completions
does not depend on the name. What is asked and answered is click's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import click

NAME = "kvstream"
VARIABLE = "_KVSTREAM_COMPLETE"  # click.Command.main is told; it would make one from the program's name

_BASH = """\
_kvstream_completion() {
    local program=$1 line response IFS=$'\\n'
    [[ $program == '~/'* ]] && program=$HOME/${program:2}
    response=$(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD="$COMP_CWORD" VARIABLE=bash_complete "$program" 2>/dev/null)
    COMPREPLY=()
    while read -r line; do
        case $line in
            plain,*) COMPREPLY+=("${line#plain,}") ;;
            file,*) compopt -o default ;;
            dir,*) compopt -o dirnames ;;
        esac
    done <<< "$response"
}
complete -o nosort -F _kvstream_completion NAMES
"""

_ZSH = """\
#compdef NAMES

_kvstream_completion() {
    local type key about
    local -a plain described response
    response=("${(@f)$(env COMP_WORDS="${(F)words}" COMP_CWORD=$((CURRENT-1)) VARIABLE=zsh_complete ${~words[1]} \\
        2>/dev/null)}")
    for type key about in $response; do
        case $type in
            plain) if [[ $about == _ ]]; then plain+=("$key"); else described+=("$key:$about"); fi ;;
            file) _path_files -f ;;
            dir) _path_files -/ ;;
        esac
    done
    if (( $#described )); then _describe -V unsorted described -U; fi
    if (( $#plain )); then compadd -U -V unsorted -a plain; fi
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _kvstream_completion "$@"  # found in a folder of $fpath
else
    compdef _kvstream_completion NAMES
fi
"""

_FISH = """\
function _kvstream_completion
    set -l program (string replace --regex '^~(?=/)' -- $HOME (commandline -opc)[1])
    set -l asked COMP_WORDS=(commandline -cp) COMP_CWORD=(commandline -t) VARIABLE=fish_complete
    for line in (env $asked $program 2>/dev/null)
        set -l part (string split --max 1 "," -- $line)
        switch $part[1]
            case plain
                echo $part[2]
            case file
                __fish_complete_path $part[2]
            case dir
                __fish_complete_directories $part[2]
        end
    end
end
for name in NAMES
    complete --command $name --no-files --arguments "(_kvstream_completion)"
end
"""

SCRIPTS: Mapping[str, str] = MappingProxyType({"bash": _BASH, "zsh": _ZSH, "fish": _FISH})


def names() -> list[str]:
    """What the script is to complete: ``kvstream``, and the file that runs, if its name is another one."""
    from .parts import own_file

    file = Path(own_file() or sys.argv[0]).name
    plain = file.replace("-", "").replace("_", "").replace(".", "").isalnum()
    return [NAME] if not plain or file in (NAME, "__main__.py") else [NAME, file]


@click.command(short_help="Print the completion script for a shell.")
@click.argument("shell", type=click.Choice(tuple(SCRIPTS)))
def completion(shell: str) -> None:
    """Print the completion script for a shell.

    It is for `kvstream`, and for the name that this file has now; print it anew after another renaming.

    \b
    bash:  kvstream completion bash > ~/.local/share/bash-completion/completions/kvstream
    zsh:   kvstream completion zsh > some folder of $fpath, as _kvstream
    fish:  kvstream completion fish > ~/.config/fish/completions/kvstream.fish
    """
    script = SCRIPTS[shell].replace("VARIABLE", VARIABLE).replace("NAMES", " ".join(names()))
    click.echo(script, nl=False)

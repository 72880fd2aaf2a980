"""All defects that tests must notice: see `tools.mutants`."""

from tools.defects.agent_files import AGENT_FILES
from tools.defects.ahead import LAUNCHED
from tools.defects.calls import STRICT_CALLS
from tools.defects.cards import CARDS
from tools.defects.clients import CLIENTS
from tools.defects.computing import COMPUTING
from tools.defects.devices import DEVICES
from tools.defects.drawing import DRAWN
from tools.defects.encryption import ENCRYPTION
from tools.defects.fleets import FLEET
from tools.defects.front import FRONTS
from tools.defects.gate import GATE
from tools.defects.hints import HINTS
from tools.defects.host import HOSTS
from tools.defects.hostile import HOSTILE
from tools.defects.kernels import KERNELS
from tools.defects.latents import LATENTS
from tools.defects.layers import LAYERS
from tools.defects.llama import LLAMA
from tools.defects.mapped import MAPPED
from tools.defects.mixtures import MIXTURES
from tools.defects.ollama import OLLAMA
from tools.defects.operating import OPERATING
from tools.defects.page import PAGE
from tools.defects.pictures import PICTURES
from tools.defects.quantised import QUANTISED
from tools.defects.receipts import CHECKS, RECEIPTS
from tools.defects.replicas import REPLICAS
from tools.defects.scores import SCORED
from tools.defects.secrets import SECRET
from tools.defects.serving import SERVING
from tools.defects.slots import SLOTS
from tools.defects.states import STATES
from tools.defects.tier import TIER
from tools.defects.wear import WEAR
from tools.defects.wheels import WHEELS
from tools.defects.windows import WINDOWS

MUTANTS = (
    *COMPUTING,
    *DEVICES,
    *CARDS,
    *DRAWN,
    *LAUNCHED,
    *SERVING,
    *OPERATING,
    *KERNELS,
    *LAYERS,
    *MAPPED,
    *MIXTURES,
    *WINDOWS,
    *STATES,
    *LATENTS,
    *QUANTISED,
    *PICTURES,
    *CLIENTS,
    *STRICT_CALLS,
    *HINTS,
    *RECEIPTS,
    *CHECKS,
    *SCORED,
    *OLLAMA,
    *FLEET,
    *REPLICAS,
    *SECRET,
    *ENCRYPTION,
    *TIER,
    *AGENT_FILES,
    *FRONTS,
    *HOSTILE,
    *HOSTS,
    *LLAMA,
    *SLOTS,
    *GATE,
    *PAGE,
    *WEAR,
    *WHEELS,
)

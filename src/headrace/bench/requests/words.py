"""The words that prompts are made of: 1,024 common English ones, each one token in the usual vocabularies.

Checked against SmolLM2's: every word is one token both with and without a space before it. No word is longer than
``MAX_WORD_CHARS``.
"""

from __future__ import annotations

from typing import Final

MAX_WORD_CHARS: Final = 7

_TEXT: Final = """
able about above accept account act action active actual add adult after again against age agency agent agree ahead
air all allow almost alone already also always among amount and annual another answer any apply area arm art article
artist as ask aspect asset attempt author average avoid aware away back bad balance ball band bank bar basic basis bat
be bear beat because before begin being belief below benefit better between big bill bird birth bit block blue board
boat body bond bone border born both bottom box boy branch bread break bridge brief bright broad brown brush budget
build burn bus button buy by call camera camp can car carbon card care case cash cast cause cell center central
century certain chair change channel chapter charge check chief choice choose church circle city civil claim classic
clean clear climate clock close cloud club coal coast code cold collect color column come comfort command comment
common compare complex concept conduct connect contact context control convert cook cool copy core correct cost could
count country course court create credit crop cross culture cup curve custom cut cycle daily dark data day deal deep
define degree delay depend depth design detail detect develop device digital direct dish display divide doctor dog
door double down draft draw dream driver drop dry due during dust duty ear early earth east easy eat edge editor
effect egg eight either elect else email employ empty enable end energy enough ensure enter entry equal error escape
event ever every exact example except expand expect expert export extend extra eye fact factor factory fail fair faith
fall family famous fan far farm fashion father fault feature fee feed feel female fiber field fight figure file fill
final find fine finger finish fire firm fish fit five fix flag flat flight flow flower fly focus folk follow foot for
force foreign forest forget form former forth forward found four frame free fresh friend from front fruit fuel fully
fun fund future gain game gap gate gather general get girl give glass goal gold good grade grain grand grass gray
great green ground group grow guard guess guide hair half hall hand hang happy hard hat have he health heart heat
heavy height help hence here hide high hill him his hit hold hole home horse host hot house how however human hundred
hurt ice ideal if image impact import in include income index inform initial inner input instead intend into invest
iron issue it its job join joint joy jump justice keep key kid kind king know label lake land large last late later
law lay layer lead leader leaf lean learn least leave left leg legal less let letter level library lie life light like
likely limit line link liquid list listen little live liver load local lock long look loss lost love low lower lung
machine magic mail mainly make male man manage many map mark market master match matter may me meal mean measure meat
media medical member memory mental menu mere message metal middle might mile milk mill mind minor minute miss mission
mix mode model moment money month moon more most mother motor mount mouse mouth move movie museum music must my name
nation native nature near neck need network never new next night nine no noise none normal north nose not note nothing
now object occur ocean odd of off office often oil old on once one onto open option or orange order organ other our
out outside over own pace pack page pain pair panel paper park part party pass past path patient pause pay peace peak
pen people perfect perform perhaps period person phase phone phrase pick picture piece pipe pitch place plan plane
planet plant plastic plate player please plot plus point policy pool popular port pose post pot pound power present
press pretty prevent price prime prior private problem process product profit program proof public pull purple purpose
push quality quarter quest quick quiet quite quote radio rail rain raise range rank rare rather ratio raw reach read
reader real really reason recall receive recent recipe red reduce reflect region regular release remote rent repair
repeat replace reply report require resolve respect respond rest result return reward rice rich ride right ring rise
river road rock role roll room rough round route routine row rub rule rush safe safety sale salt same sample save say
scale scene school science score screen sea search season seat second section sector secure see seed seek self sell
send sense series service session seven several shape share sharp she sheet shift shine ship shirt shop shore should
show shut side sight sign signal simple since sing single sit site six skill skin sky sleep slice slip small smart
smooth snow so social soft solid solve some son song soon sort soup source south space special speech spin spirit
split spot spread spring square staff stage stamp stand star start state status stay step stick still stock stop store
storm story stream street stress strip strong student study stuff style success such sugar suggest summer sun super
support surface survey sweet switch symbol system tail take tale talk tall tank task tax teacher team tear tell ten
test text than thank that the their theme then theory there they thick thing think third this those though thought
three through thus tie tight time tiny title to today toe tone too tooth top topic total touch tower town trade train
travel treat tree trial trip trust truth try tube tune turn type typical under union unique unit unity unless until up
upon upper urban use used user usual usually value van vehicle version very via video view visible visit visual voice
volume vote wage walk wall want warm warn wash waste water wave way we weak wealth wear web week weekly weight well
west what wheat wheel when where whether which white who whole whose why wide wife will win wind window wing winner
wire wise with within without woman wood work worker world worth would wrap write wrong yard year yellow yes yet you
young your zone
"""

WORDS: Final = tuple(_TEXT.split())

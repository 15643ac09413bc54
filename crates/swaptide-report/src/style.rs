//! Colours, light and dark.
//!
//! The colours of lines are of the palette of Okabe and Ito, which people who see fewer colours can
//! tell apart, made darker or lighter so that each has a contrast of 3:1 at least to its ground. No
//! line relies on its colour alone: its name and its kind of stroke stand in the legend.

/// A class, its colour on a light ground, and on a dark one.
const COLOURS: [(&str, &str, &str); 5] = [
    ("a", "#0072b2", "#56b4e9"),
    ("b", "#c25500", "#f0a33c"),
    ("c", "#007a5a", "#2fc29a"),
    ("d", "#a8487c", "#dc8fbb"),
    ("e", "#7a5c00", "#e6d84a"),
];
const LIGHT: Ground =
    Ground { paper: "#ffffff", ink: "#1d2127", faint: "#59616c", rule: "#dde1e6" };
const DARK: Ground = Ground { paper: "#15181c", ink: "#e6e9ed", faint: "#a3abb6", rule: "#343a42" };

struct Ground {
    paper: &'static str,
    ink: &'static str,
    faint: &'static str,
    rule: &'static str,
}

/// What of the style is not a colour.
const SHAPES: &str = "
text{font:11px system-ui,sans-serif}
text.title{font-size:14px;font-weight:600}
text.head{font-size:18px;font-weight:600}
.grid{stroke-width:1;fill:none}
.line{fill:none;stroke-width:1.6;stroke-linejoin:round}
.area{stroke:none;fill-opacity:.14}
.line.b{stroke-dasharray:7 2}
.line.d{stroke-dasharray:3 2}
.line.limit{stroke-width:1.4;stroke-dasharray:2 3}
";

fn colours(ground: &Ground, of: fn(&(&str, &'static str, &'static str)) -> &'static str) -> String {
    let Ground { paper, ink, faint, rule } = ground;
    let mut sheet = format!(
        ".paper{{fill:{paper}}}\ntext{{fill:{ink}}}\ntext.faint{{fill:{faint}}}\n\
        .grid{{stroke:{rule}}}\n.line.limit{{stroke:{ink}}}\n"
    );
    for colour in &COLOURS {
        let (class, value) = (colour.0, of(colour));
        sheet += &format!(".line.{class}{{stroke:{value}}}\n.area.{class}{{fill:{value}}}\n");
    }
    sheet
}

/// The style of charts. Without variables: some programs that show SVG have none.
pub(crate) fn charts() -> String {
    format!(
        "{SHAPES}{}@media (prefers-color-scheme:dark){{\n{}}}\n",
        colours(&LIGHT, |colour| colour.1),
        colours(&DARK, |colour| colour.2)
    )
}

/// The style of a page, without that of its charts.
pub(crate) fn page() -> String {
    let ground = |Ground { paper, ink, faint, rule }: &Ground| {
        format!(":root{{--paper:{paper};--ink:{ink};--faint:{faint};--rule:{rule}}}\n")
    };
    format!("{}@media (prefers-color-scheme:dark){{{}}}\n{PAGE}", ground(&LIGHT), ground(&DARK))
}

const PAGE: &str = "
:root{color-scheme:light dark}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.45 system-ui,sans-serif}
main{max-width:1500px;margin:0 auto;padding:1rem}
h1{font-size:1.4rem;margin:.2rem 0 .8rem;overflow-wrap:anywhere}
h2{font-size:1.05rem;margin:0 0 .2rem}
h2.values{margin-top:1.4rem}
p{margin:.4rem 0;max-width:46rem}
.faint,footer{color:var(--faint)}
.scroll{overflow-x:auto;max-width:100%;margin-bottom:1.2rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:.25rem .8rem .25rem 0}
th,td{border-bottom:1px solid var(--rule)}
tbody th{font-weight:400;color:var(--faint);min-width:7.5rem}
thead th{font-weight:600}
td{min-width:9rem;max-width:32rem;overflow-wrap:anywhere}
code{font:13px ui-monospace,monospace;unicode-bidi:isolate}
table.values td,table.values th{white-space:nowrap;min-width:0;text-align:right;font-size:13px}
.panels{display:grid;gap:1.4rem 1.6rem}
.panels{grid-template-columns:repeat(auto-fit,minmax(min(100%,25rem),1fr))}
.panels.several{display:block}
.several .panel{margin-bottom:1.6rem}
.charts{display:grid;gap:.6rem 1.6rem}
.charts{grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr))}
figure{margin:0;max-width:44rem;min-width:0}
figcaption{font-size:13px;color:var(--faint);overflow-wrap:anywhere}
figure svg{display:block;width:100%;height:auto}
ul.legend{list-style:none;margin:0 0 .3rem;padding:0;font-size:13px}
ul.legend{display:flex;flex-wrap:wrap;gap:.1rem 1.1rem}
.legend li{display:flex;align-items:center;gap:.4rem}
.legend svg{width:28px;height:10px;flex:none}
details{margin:.5rem 0}
summary{cursor:pointer}
footer{margin-top:1.5rem;font-size:13px}
@media (max-width:30rem){figure text{font-size:13px}}
";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::panels::PANELS;

    /// The relative luminance of a colour, as the guidelines for accessible content define it.
    fn luminance(colour: &str) -> f64 {
        let channel = |at: usize| {
            let value = u8::from_str_radix(&colour[at..at + 2], 16).expect("a colour");
            let value = f64::from(value) / 255.0;
            if value <= 0.04045 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
        };
        0.2126 * channel(1) + 0.7152 * channel(3) + 0.0722 * channel(5)
    }

    fn contrast(one: &str, other: &str) -> f64 {
        let (one, other) = (luminance(one), luminance(other));
        (one.max(other) + 0.05) / (one.min(other) + 0.05)
    }

    #[test]
    fn lines_and_texts_stand_out_from_their_ground() {
        for (class, light, dark) in COLOURS {
            assert!(contrast(light, LIGHT.paper) >= 3.0, "{class}");
            assert!(contrast(dark, DARK.paper) >= 3.0, "{class}");
        }
        for ground in [LIGHT, DARK] {
            assert!(contrast(ground.ink, ground.paper) >= 7.0);
            assert!(contrast(ground.faint, ground.paper) >= 4.5);
        }
    }

    #[test]
    fn every_line_has_a_style() {
        let sheet = charts();
        for line in PANELS.iter().flat_map(|panel| panel.lines) {
            assert!(sheet.contains(&format!(".line.{}{{stroke:", line.class)), "{}", line.name);
        }
    }
}

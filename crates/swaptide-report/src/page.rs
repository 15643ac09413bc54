//! All of it on one page, which needs nothing else: no script, no file, no network.
//!
//! The page is HTML that is well-formed XML, too.

use swaptide_host::units::human;

use crate::chart::{self, Axes, HEIGHT, WIDTH, coordinate};
use crate::figures::{COLUMNS, Fact, NamedRun, facts, over_time};
use crate::panels::{PANELS, Panel, axis, time_axis};
use crate::saved::SavedReport;
use crate::style;
use crate::xml::Xml;

/// The page of reports, each with the name of its file.
pub(crate) fn page(runs: &[(String, SavedReport)]) -> String {
    let named: Vec<NamedRun<'_>> = runs.iter().map(|(file, run)| NamedRun { file, run }).collect();
    let names: Vec<&str> = named.iter().map(|named| named.run.run.program.as_str()).collect();
    let title = format!("swaptide: {}", names.join(", "));
    let mut xml = Xml::new("<!DOCTYPE html>\n");
    xml.within("html", &[("xmlns", "http://www.w3.org/1999/xhtml"), ("lang", "en")], |xml| {
        xml.within("head", &[], |xml| {
            xml.empty("meta", &[("charset", "utf-8")]);
            let width = "width=device-width, initial-scale=1";
            xml.empty("meta", &[("name", "viewport"), ("content", width)]);
            let policy = "default-src 'none'; style-src 'unsafe-inline'";
            xml.empty("meta", &[("http-equiv", "Content-Security-Policy"), ("content", policy)]);
            xml.text("title", &[], &title);
            xml.style(&(style::charts() + &style::page()));
        });
        xml.within("body", &[], |xml| {
            xml.within("main", &[], |xml| {
                xml.text("h1", &[], &title);
                summary(xml, &named);
                charts(xml, &named);
                values(xml, &named);
                footer(xml);
            });
        });
    });
    xml.finish()
}

/// A table that may be wider than the page.
fn table(xml: &mut Xml, label: &str, class: &str, rows: impl FnOnce(&mut Xml)) {
    let scroll =
        [("class", "scroll"), ("role", "region"), ("tabindex", "0"), ("aria-label", label)];
    xml.within("div", &scroll, |xml| xml.within("table", &[("class", class)], rows));
}

/// How a run is called where there are several.
fn call(number: usize, named: &NamedRun<'_>) -> String {
    let budget = human(named.run.budget_bytes);
    format!("Run {}: {}, budget {budget}", number + 1, named.run.run.program)
}

fn summary(xml: &mut Xml, named: &[NamedRun<'_>]) {
    let all: Vec<_> = named.iter().map(facts).collect();
    table(xml, "Runs", "runs", |xml| {
        if named.len() > 1 {
            xml.within("thead", &[], |xml| {
                xml.within("tr", &[], |xml| {
                    xml.text("td", &[], "");
                    for (number, run) in named.iter().enumerate() {
                        xml.text("th", &[("scope", "col")], &call(number, run));
                    }
                });
            });
        }
        xml.within("tbody", &[], |xml| {
            let Some(first) = all.first() else { return };
            for (row, (name, _)) in first.iter().enumerate() {
                xml.within("tr", &[], |xml| {
                    xml.text("th", &[("scope", "row")], name);
                    for facts in &all {
                        match &facts[row].1 {
                            Fact::Words(text) => xml.text("td", &[], text),
                            Fact::Code(text) => {
                                xml.within("td", &[], |xml| xml.text("code", &[], text));
                            }
                        }
                    }
                });
            }
        });
    });
}

fn charts(xml: &mut Xml, named: &[NamedRun<'_>]) {
    let reports: Vec<&SavedReport> = named.iter().map(|named| named.run).collect();
    let time = time_axis(&reports);
    let class = if named.len() > 1 { "panels several" } else { "panels" };
    xml.within("div", &[("class", class)], |xml| {
        for (number, panel) in PANELS.iter().enumerate() {
            let axes = Axes { time, values: axis(panel, &reports) };
            let head = format!("h{number}");
            xml.within("section", &[("class", "panel"), ("aria-labelledby", &head)], |xml| {
                xml.text("h2", &[("id", &head)], panel.title);
                legend(xml, panel);
                xml.within("div", &[("class", "charts")], |xml| {
                    for (column, run) in named.iter().enumerate() {
                        xml.within("figure", &[], |xml| {
                            if named.len() > 1 {
                                xml.text("figcaption", &[], &call(column, run));
                            }
                            let id = format!("p{number}-{column}");
                            figure(xml, &id, panel, run.run, axes);
                        });
                    }
                });
            });
        }
    });
}

fn figure(xml: &mut Xml, id: &str, panel: &Panel, run: &SavedReport, axes: Axes) {
    let size = format!("0 0 {} {}", coordinate(WIDTH), coordinate(HEIGHT));
    let described = format!("{id}-d");
    let root = [
        ("xmlns", "http://www.w3.org/2000/svg"),
        ("viewBox", &*size),
        ("role", "img"),
        ("aria-labelledby", id),
        ("aria-describedby", &*described),
    ];
    xml.within("svg", &root, |xml| chart::draw(xml, id, panel, run, axes));
}

fn legend(xml: &mut Xml, panel: &Panel) {
    xml.within("ul", &[("class", "legend")], |xml| {
        for line in panel.lines {
            xml.within("li", &[], |xml| {
                let root = [
                    ("xmlns", "http://www.w3.org/2000/svg"),
                    ("viewBox", "0 0 28 10"),
                    ("aria-hidden", "true"),
                ];
                xml.within("svg", &root, |xml| chart::swatch(xml, line, 0.0, 0.0));
                xml.text("span", &[], line.name);
            });
        }
    });
}

/// The same as a table, for those who do not see the charts.
fn values(xml: &mut Xml, named: &[NamedRun<'_>]) {
    xml.text("h2", &[("class", "values")], "Values");
    for (number, run) in named.iter().enumerate() {
        xml.within("details", &[], |xml| {
            let name = format!("{} over time, as a table", call(number, run));
            xml.text("summary", &[], &name);
            table(xml, &name, "values", |xml| {
                xml.within("thead", &[], |xml| {
                    xml.within("tr", &[], |xml| {
                        for column in COLUMNS {
                            xml.text("th", &[("scope", "col")], column);
                        }
                    });
                });
                xml.within("tbody", &[], |xml| {
                    for row in over_time(run.run) {
                        xml.within("tr", &[], |xml| {
                            row.iter().for_each(|cell| xml.text("td", &[], cell));
                        });
                    }
                });
            });
        });
    }
}

fn footer(xml: &mut Xml) {
    xml.within("footer", &[], |xml| {
        xml.text(
            "p",
            &[],
            "Bytes are the most within each interval of time, the budget the least; faults, pages \
            and stalls are averages over it. K, M and G are powers of 1024 for bytes. All runs \
            have the same scales.",
        );
        let version = concat!("Drawn by swaptide ", env!("CARGO_PKG_VERSION"), ".");
        xml.text("p", &[], version);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saved::tests::{parse, sample};
    use crate::xml::tests::parse as elements;
    use proptest::prelude::*;

    fn page_of(values: &[serde_json::Value]) -> String {
        let run = |value| ("x.json".to_owned(), parse(value).expect("a report"));
        page(&values.iter().map(run).collect::<Vec<_>>())
    }

    #[test]
    fn a_page_needs_nothing_else() {
        let html = page_of(&[sample(50), sample(7)]);
        assert!(html.starts_with("<!DOCTYPE html>\n<html "));
        let (names, texts) = elements(&html);
        for name in ["script", "img", "link", "iframe", "object", "use", "image", "a"] {
            assert!(!names.iter().any(|found| found == name), "{name}");
        }
        let without_names = html.replace("http://www.w3.org/", "");
        for part in ["http:", "https:", "url(", "@import", "src=", "href="] {
            assert!(!without_names.contains(part), "{part}");
        }
        let count = |name: &str| names.iter().filter(|found| *found == name).count();
        assert_eq!(count("figure"), 2 * PANELS.len());
        assert_eq!(count("details"), 2);
        assert!(texts.contains("Run 2: sort, budget 64M"));
    }

    #[test]
    fn ids_are_unique_and_those_that_are_named_exist() {
        let html = page_of(&[sample(5), sample(5)]);
        let all = |begin: &str| {
            let parts = html.split(begin).skip(1);
            parts.map(|rest| rest.split('"').next().unwrap_or("").to_owned()).collect::<Vec<_>>()
        };
        let mut ids = all(" id=\"");
        for named in [all("aria-labelledby=\""), all("aria-describedby=\"")].concat() {
            assert!(ids.contains(&named), "{named}");
        }
        let count = ids.len();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), count);
    }

    #[test]
    fn elements_that_html_does_not_close_are_not_left_empty() {
        // `<td/>` is a start to a reader of HTML; within SVG it is an element.
        let html = page_of(&[sample(5)]);
        for part in html.split("/>").filter_map(|part| part.rsplit('<').next()) {
            let name = part.split([' ', '\n']).next().unwrap_or("");
            let closes = ["meta", "path"].contains(&name) || part.starts_with('/');
            assert!(closes, "<{part}/>");
        }
    }

    #[test]
    fn long_texts_of_a_report_do_not_make_a_large_page() {
        let plain = page_of(&[sample(2), sample(2)]).len();
        let long = "&".repeat(1 << 20);
        let mut value = sample(2);
        value["run"]["program"] = long.as_str().into();
        value["run"]["command"] = serde_json::json!([long, long]);
        value["devices"][1]["place"] = long.as_str().into();
        value["devices"][1]["type"] = long.as_str().into();
        value["errors"][&long] = 1.into();
        let runs = [value.clone(), value];
        let html = page_of(&runs);
        assert!(html.len() < plain + (512 << 10), "{}", html.len());
        let runs = runs.map(|value| ("x.json".to_owned(), parse(&value).expect("a report")));
        let svg = crate::svg::picture(&runs);
        assert!(svg.len() < plain + (512 << 10), "{}", svg.len());
    }

    proptest! {
        #[test]
        fn no_text_brings_an_element(program in any::<String>(), word in any::<String>()) {
            let mut value = sample(2);
            value["run"]["program"] = program.as_str().into();
            value["run"]["command"] = serde_json::json!([program, word]);
            let html = page_of(&[value]);
            prop_assert_eq!(elements(&html).0, elements(&page_of(&[sample(2)])).0);
        }
    }
}

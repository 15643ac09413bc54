//! Elements, and the escaping of everything between them.
//!
//! Invariants
//! 1. What is written is well-formed XML, whatever the texts hold: what the two characters `<` and
//!    `&` do is the writer's matter, and characters that XML does not have, or that change what is
//!    seen around them, are written as their numbers.

use std::fmt::Write;

use quick_xml::Writer;
use quick_xml::events::{BytesEnd, BytesStart, BytesText, Event};

/// The attributes of an element.
pub(crate) type Attributes<'a> = &'a [(&'a str, &'a str)];

/// A text as it can be shown: control characters and those that turn the direction of writing are
/// replaced by their numbers, or as they are usually written.
fn visible(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        let is_hidden = c.is_control()
            || matches!(c,
                '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
                | '\u{fffe}' | '\u{ffff}' | '\u{e0000}'..='\u{e007f}');
        if matches!(c, '\n' | '\t' | '\r') {
            shown.extend(c.escape_default());
        } else if is_hidden {
            let _ = write!(shown, "\\u{{{:x}}}", u32::from(c));
        } else {
            shown.push(c);
        }
    }
    shown
}

/// A document that is being written.
pub(crate) struct Xml(Writer<Vec<u8>>);

impl Xml {
    /// One that begins with `head`, which is written as it is.
    pub(crate) fn new(head: &str) -> Xml {
        Xml(Writer::new(head.as_bytes().to_vec()))
    }

    fn put(&mut self, event: Event<'_>) {
        // Memory takes everything.
        let _ = self.0.write_event(event);
    }

    fn start(&mut self, name: &str, attributes: Attributes<'_>) {
        self.put(Event::Start(begin(name, attributes)));
    }

    /// An element without content.
    pub(crate) fn empty(&mut self, name: &str, attributes: Attributes<'_>) {
        self.put(Event::Empty(begin(name, attributes)));
    }

    /// An element with text in it.
    pub(crate) fn text(&mut self, name: &str, attributes: Attributes<'_>, text: &str) {
        self.start(name, attributes);
        self.put(Event::Text(BytesText::new(&visible(text))));
        self.put(Event::End(BytesEnd::new(name)));
    }

    /// An element with others in it.
    pub(crate) fn within(
        &mut self,
        name: &str,
        attributes: Attributes<'_>,
        content: impl FnOnce(&mut Xml),
    ) {
        self.start(name, attributes);
        content(self);
        self.put(Event::End(BytesEnd::new(name)));
        self.0.get_mut().push(b'\n');
    }

    /// A style sheet of this crate's own; it has none of the characters that are escaped.
    pub(crate) fn style(&mut self, sheet: &str) {
        debug_assert!(!sheet.contains(['<', '&']), "it would be read otherwise as HTML");
        self.start("style", &[]);
        self.put(Event::Text(BytesText::from_escaped(sheet)));
        self.put(Event::End(BytesEnd::new("style")));
    }

    /// The document.
    pub(crate) fn finish(self) -> String {
        let mut bytes = self.0.into_inner();
        bytes.push(b'\n');
        String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }
}

fn begin<'a>(name: &'a str, attributes: Attributes<'_>) -> BytesStart<'a> {
    let mut start = BytesStart::new(name);
    for (key, value) in attributes {
        start.push_attribute((*key, visible(value).as_str()));
    }
    start
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;
    use quick_xml::Reader;

    /// The names of all elements, and all texts, of a document that is well-formed.
    pub(crate) fn parse(document: &str) -> (Vec<String>, String) {
        let mut reader = Reader::from_str(document);
        reader.config_mut().enable_all_checks(true);
        let (mut names, mut texts, mut depth) = (Vec::new(), String::new(), 0);
        loop {
            match reader.read_event().unwrap_or_else(|e| panic!("{e}: {document}")) {
                Event::Eof => break,
                Event::Start(start) => {
                    depth += 1;
                    start.attributes().for_each(|a| drop(a.expect("an attribute")));
                    names.push(start.name().as_ref().to_owned());
                }
                Event::Empty(start) => {
                    start.attributes().for_each(|a| drop(a.expect("an attribute")));
                    names.push(start.name().as_ref().to_owned());
                }
                Event::End(_) => depth -= 1,
                Event::Text(text) => texts.push_str(&text),
                Event::GeneralRef(name) => {
                    texts.push_str(match &*name {
                        "lt" => "<",
                        "gt" => ">",
                        "amp" => "&",
                        "quot" => "\"",
                        "apos" => "'",
                        other => panic!("&{other}; stands for no character here"),
                    });
                }
                _ => {}
            }
        }
        assert_eq!(depth, 0, "every element ends");
        (names, texts)
    }

    #[test]
    fn a_hostile_text_stays_a_text() {
        let hostile = "</title><script>alert(1)</script>\"' onload='x' & \u{1}\u{202e}\n]]>";
        let mut xml = Xml::new("");
        xml.within("a", &[("b", hostile)], |xml| xml.text("c", &[], hostile));
        let document = xml.finish();
        let (names, texts) = parse(&document);
        assert_eq!(names, ["a", "c"]);
        assert_eq!(texts.trim_end(), visible(hostile));
        assert!(texts.contains("\\u{1}\\u{202e}\\n"), "{texts}");
        assert!(!document.contains("<script"), "{document}");
    }

    proptest! {
        #[test]
        fn any_text_comes_out_as_it_is_shown(text in any::<String>()) {
            let mut xml = Xml::new("");
            xml.within("a", &[("b", &text)], |xml| xml.text("c", &[("d", &text)], &text));
            let (names, texts) = parse(&xml.finish());
            prop_assert_eq!(names, ["a", "c"]);
            prop_assert_eq!(texts.trim_end_matches('\n'), visible(&text));
        }
    }
}

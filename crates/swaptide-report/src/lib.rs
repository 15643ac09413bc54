//! `swaptide report`: draws runs from the files of `swaptide run --report`, as SVG or as one HTML
//! page.
//!
//! | module | owns |
//! |--------|------|
//! | command | the command line: what is read, where the pictures go |
//! | saved | reading a report; what is none is refused |
//! | figures | the table: what is told of a run in words and figures |
//! | panels | which values are drawn, and on which scales |
//! | scale | ticks of axes, and how values are written |
//! | chart | one panel of one run |
//! | style | colours, light and dark |
//! | svg, page | all of it in one picture, or on one page |
//! | xml | elements and the escaping of everything between them |
//!
//! A report may come from anywhere, and holds the command line of a program: nothing of it reaches
//! a picture but through `xml`.
//!
//! Locks: none.

mod chart;
mod command;
mod figures;
mod page;
mod panels;
mod saved;
mod scale;
mod style;
mod svg;
mod xml;

pub use command::{DrawError, ReportArgs, main};
pub use saved::NotAReport;

//! `--tp`, `--tp-rule` and `--read-through`: the part of one of several ranks, how tensors are
//! divided, and what is read between.

use std::str::FromStr;

use clap::Args;
use onelayer::{Rank, Split, SplitRules};
use regex::Regex;
use serde::{Deserialize, Serialize};

use super::values::reason_of;
use crate::sizes::{Size, SizeError};

/// Which rank's part is loaded. Shared by `run` and `plan`.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
#[command(next_help_heading = "Load")]
pub(crate) struct RankArgs {
    /// Only that rank's part of each tensor: 0/4, ..., 3/4
    ///
    /// As engines divide common architectures for tensor parallelism: queries, keys, values, gate
    /// and up by their outputs, attention's output and down by their inputs, vocabularies by
    /// 64, everything else whole. Parts by rows are contiguous. For parts by columns, short holes
    /// are read through (`--read-through`), and the plan says how much that is.
    #[arg(long, value_name = "RANK/WORLD", hide_short_help = true)]
    pub(crate) tp: Option<Tp>,
    /// Override how matching tensors are divided: REGEX=AXIS
    ///
    /// `=whole` leaves them whole, `=0` divides rows and `=1` columns; `=0:3` divides rows of three
    /// tensors that are fused into one, each by itself. The first rule that matches counts,
    /// before what is known of the architecture. May be repeated.
    #[arg(long, value_name = "REGEX=AXIS", requires = "tp", hide_short_help = true)]
    pub(crate) tp_rule: Vec<TpRule>,
    /// Read through holes of up to this size: 64KiB
    ///
    /// Between two tensors, and inside a rank's part of one: one longer request instead of two. `0`
    /// reads only what is wanted and what alignment adds, which takes more requests.
    #[arg(long, value_name = "SIZE", value_parser = hole_size, hide_short_help = true)]
    pub(crate) read_through: Option<u64>,
}

/// `--tp`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Tp(Rank);

/// `--tp-rule`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct TpRule {
    /// As it was given: it compiles.
    pattern: String,
    /// `None` is whole.
    division: Option<Division>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Division {
    axis: usize,
    blocks: u64,
}

impl RankArgs {
    /// The rank, and how tensors are divided.
    pub(crate) fn shard(&self) -> Option<(Rank, SplitRules)> {
        let Tp(rank) = self.tp?;
        // The library asks the last rule first.
        let rules = self.tp_rule.iter().rev().fold(SplitRules::common(), |rules, rule| {
            let pattern = Regex::new(&rule.pattern).expect("it compiled when it was parsed");
            let split = rule.split();
            rules.with(move |tensor| pattern.is_match(tensor.name).then(|| split.clone()))
        });
        Some((rank, rules))
    }

    /// As a report has it.
    pub(crate) fn text(&self) -> Option<String> {
        self.tp.map(String::from)
    }
}

impl TpRule {
    fn split(&self) -> Split {
        match self.division {
            None => Split::Whole,
            Some(Division { axis, blocks }) => Split::Even { axis, blocks },
        }
    }
}

impl FromStr for Tp {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split_once('/').and_then(|(rank, world)| Some((number(rank)?, number(world)?)));
        let rank = numbers.and_then(|(rank, world)| Rank::new(rank, world)).map(Self);
        rank.ok_or_else(|| "write RANK/WORLD, ranks from 0: 0/2 or 1/2".to_owned())
    }
}

impl FromStr for TpRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || "write REGEX=AXIS, REGEX=AXIS:BLOCKS or REGEX=whole".to_owned();
        let (pattern, how) = text.rsplit_once('=').ok_or_else(expected)?;
        Regex::new(pattern).map_err(|error| reason_of(&error))?;
        let (axis, blocks) = how.split_once(':').unwrap_or((how, "1"));
        let division = || {
            let (axis, blocks) = (number(axis)?, number::<u64>(blocks).filter(|&blocks| blocks > 0)?);
            Some(Division { axis, blocks })
        };
        let division = if how == "whole" { None } else { Some(division().ok_or_else(expected)?) };
        Ok(Self { pattern: pattern.to_owned(), division })
    }
}

/// A size in bytes, nothing relative.
fn hole_size(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(Size::Bytes(bytes)) => Ok(bytes),
        Ok(_) => Err("write a size in bytes, such as 64KiB or 0".to_owned()),
        Err(error) => Err(SizeError::to_string(&error)),
    }
}

/// Digits alone: `+1` is none.
fn number<T: FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

impl From<Tp> for String {
    fn from(Tp(rank): Tp) -> Self {
        format!("{}/{}", rank.rank(), rank.world())
    }
}

impl From<TpRule> for String {
    fn from(rule: TpRule) -> Self {
        match rule.division {
            None => format!("{}=whole", rule.pattern),
            Some(Division { axis, blocks: 1 }) => format!("{}={axis}", rule.pattern),
            Some(Division { axis, blocks }) => format!("{}={axis}:{blocks}", rule.pattern),
        }
    }
}

impl TryFrom<String> for Tp {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl TryFrom<String> for TpRule {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_below_their_number() {
        let parsed = |text: &str| text.parse::<Tp>().map(String::from);
        assert_eq!(parsed("0/1"), Ok("0/1".to_owned()));
        assert_eq!(parsed("3/4"), Ok("3/4".to_owned()));
        for text in ["4/4", "0/0", "1", "1/", "/2", "-1/2", "+1/2", "1/2/3", ""] {
            assert!(parsed(text).is_err(), "{text}");
        }
    }

    #[test]
    fn rules_name_an_axis() {
        for text in ["a=b=0", "^x$=1", "qkv=0:3", "norm=whole", "=0"] {
            assert_eq!(text.parse::<TpRule>().map(String::from), Ok(text.to_owned()));
        }
        assert_eq!("x=0:1".parse::<TpRule>().map(String::from), Ok("x=0".to_owned()));
        assert_eq!((hole_size("64KiB"), hole_size("0")), (Ok(64 << 10), Ok(0)));
        assert!(hole_size("2x-layer").is_err() && hole_size("").is_err());
        for text in ["x", "x=", "x=a", "x=-1", "x=0:", "x=0:0", "(=0", "x=0:1:2"] {
            assert!(text.parse::<TpRule>().is_err(), "{text}");
        }
    }
}
